"""Fakes for tests: a device that copies late on a CPU, and several ranks in one process.

    from accel_state.testing import late_device

    @pytest.mark.parametrize("schedule", ["late", "early"])
    def test_my_prefetching(schedule):
        with late_device(schedule) as device:  # the CPU's streams
            ...  # code that uses `accel_state.streams.device_streams(torch.device("cpu"))`
        # raises RaceError if accesses were not ordered

The device follows the rules of streams and no others:

- The bytes of a copy arrive at the last moment that waits permit (`"early"`: as soon as they may).
- `empty` and `pinned` hand out poisoned memory, if possible that which was freed last. Memory whose last
  tensor goes while another stream may use it, without `record_stream`, is reported.
- Two accesses to the same bytes of a storage, one of them a write, that no event orders are reported with
  both places in the code. An operator is an access of its thread's current stream; one on pinned memory alone
  is the host's. A change that anything else makes to what a pending copy reads is found, too.

`pin_memory`, `is_pinned` and `to` of the CPU's tensors mean what they mean with a device: `to("cpu")` of a
pinned tensor uploads it, on the current stream.

All host threads count as one: what one of them has waited for, the others know.

`ThreadRanks` runs several ranks in one process, with collectives between them:

    def test_my_collective():
        assert ThreadRanks(size=2).run(lambda rank: my_sum(rank)) == [1, 1]
"""

from accel_state._lazy import attach

attach(__name__)
