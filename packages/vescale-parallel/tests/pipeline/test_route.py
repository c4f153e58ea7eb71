"""A forward follows the calls that one before it has noted, and leaves them at others."""

from vescale_parallel._pipeline.route import Following, Routes, Turn

TURNS = (Turn("embed", "stand in", 0, "call"), Turn("a", "take over", 0), Turn("b", "give", 0))


def noted(routes: Routes) -> Routes:
    first = Following(1, routes)
    assert first.left
    for turn in TURNS:
        assert first.due(turn.name) is None
        first.note(turn)
    first.ended()
    return routes


def test_what_is_noted_is_followed():
    second = Following(1, noted({}))
    for turn in TURNS:
        assert not second.is_done()
        assert second.due(turn.name) is turn
        assert second.now(turn.name) is turn
        assert second.now("another") is None
    assert second.is_done()


def test_a_forward_that_has_not_ended_notes_nothing():
    routes: Routes = {}
    Following(1, routes).note(TURNS[0])
    assert routes == {}


def test_another_call_leaves_the_route_and_it_is_forgotten():
    routes = noted({})
    found = Following(1, routes)
    assert found.due("embed") is TURNS[0]
    assert found.due("b") is None
    assert found.leave() == ["embed"]
    assert found.due("a") is None
    assert found.now("embed") is None
    assert routes == {}


def test_a_call_that_cannot_be_followed_does_not_count():
    found = Following(1, noted({}))
    found.due("embed")
    found.due("a")
    assert found.leave(before=True) == ["embed"]


def test_routes_are_by_stage_and_a_rehearsal_has_none():
    assert Following(0, noted({})).left
    rehearsal = Following(1, None)
    rehearsal.note(TURNS[0])
    rehearsal.ended()
    assert rehearsal.left


def test_what_is_decided_by_arguments_is_not_noted():
    routes: Routes = {}
    found = Following(1, routes)
    found.note(TURNS[0])
    found.forget()
    found.ended()
    assert routes == {}
