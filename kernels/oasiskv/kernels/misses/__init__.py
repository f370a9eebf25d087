"""Blocks that a step selected and that are not on this host: a device asks the host for them and waits."""

from oasiskv.kernels.misses.op import ABSENT, Mailbox, ask

__all__ = ["ABSENT", "Mailbox", "ask"]
