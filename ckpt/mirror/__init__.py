"""The two buffers a rank's state is copied into, and the shared-memory file that lets them outlive the process.

Nothing is imported here: `slots` (private memory), `mirror` (what a save and a restore use), `leftovers` (the files of
dead jobs).
"""
