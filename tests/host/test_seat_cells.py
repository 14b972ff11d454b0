from holdfast.host.wire import control_block as cells


def test_each_cell_of_a_seat_has_one_meaning_and_lies_before_the_next_seat() -> None:
    for seat in (0, 7):
        waits = cells.wait_cells(seat)
        kinds = [
            cells.step_cell,
            cells.notice_cell,
            cells.cost_cell,
            cells.first_step_cell,
            cells.first_time_cell,
            cells.blocked_cell,
            cells.step_time_cell,
            cells.blocked_before_cell,
            cells.blocked_step_cell,
            cells.call_cell,
            cells.accepted_cell,
            cells.met_cell,
            cells.decided_cell,
        ]
        own = [kind(seat) for kind in kinds] + [waits.since, waits.reason, waits.step]
        own += [*range(waits.ended.start, waits.ended.stop)]
        own += [*range(waits.before.start, waits.before.stop)]
        assert len(set(own)) == len(own)
        assert min(own) == cells.step_cell(seat)
        assert max(own) < cells.step_cell(seat + 1)
