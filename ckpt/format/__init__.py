"""What lies on a store, byte by byte. FORMAT.md beside this file is the specification."""
