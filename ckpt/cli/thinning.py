"""``ckpt prune --fast``: what leaves the fast one of two tiers. Plans, shows, does."""

from __future__ import annotations

from ckpt.cli.screen import bytes_text, count, print_fates, print_json
from ckpt.history.keep import Keep
from ckpt.history.thinning import ThinPlan, execute_thinning, plan_thinning
from storage_backends.base import Store
from storage_backends.tiered import TieredStore


def thin(store: Store, keep: Keep, dry_run: bool, as_json: bool) -> None:
    """Thin the fast tier by a policy, and say so.

    Raises:
        ValueError: the store has no tiers.
        StorageError: one of them failed.
    """
    if not isinstance(store, TieredStore):
        raise ValueError(f"{store.url} has no fast tier; expected tiered::FAST|DURABLE")
    plan = plan_thinning(store, keep, orphans=True)
    if not as_json:
        _print_plan(plan, store.fast.url, dry_run)
    if not dry_run:
        execute_thinning(plan, store)
    if as_json:
        print_json(
            {
                "dry_run": dry_run,
                "tier": store.fast.url,
                "snapshots": [str(id_) for id_ in plan.snapshots],
                "kept": {str(id_): why for id_, why in sorted(plan.kept.items())},
                "keys": plan.keys,
                "freed": plan.freed,
            }
        )


def _print_plan(plan: ThinPlan, tier: str, dry_run: bool) -> None:
    rows = [(id_, "leaves", "it stays on the durable tier") for id_ in plan.snapshots]
    rows += [(id_, "keep", why) for id_, why in plan.kept.items()]
    print_fates(rows)
    if not plan.keys:
        print(f"nothing to take off {tier}")
        return
    verb = "would take" if dry_run else "taking"
    print(
        f"{verb} {count(len(plan.snapshots), 'snapshot')}, {count(len(plan.keys), 'object')}, "
        f"{bytes_text(plan.freed)} off {tier}",
        flush=True,
    )
    if dry_run:
        for key in plan.keys:
            print(f"  {key}")
