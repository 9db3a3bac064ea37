"""The judge of the power cuts, judged: what it lets pass and what it does not."""

from __future__ import annotations

import pytest

from tests.fault.history import History, content_id, content_of


def test_contents_tell_who_wrote_them_and_whether_they_are_whole() -> None:
    for event in range(1, 40):
        data = content_of(event)
        assert content_id(data) == event
        if len(data) > 8:
            assert content_id(data[:-1]) is None
            assert content_id(data[:-1] + bytes([data[-1] ^ 1])) is None
    assert content_id(b"") is None


@pytest.fixture
def history() -> History:
    """a: 1, then deleted by 3; b: 2; c: 4 and 5, the first of them flushed."""
    made = History()
    made.save("a")
    made.flushed("a")
    made.save("b")
    made.unlink("a")
    made.save("c")
    made.file_flushed("c")
    made.save("c")
    return made


@pytest.mark.parametrize(
    "tree",
    [
        {"b": 2, "c": 5},
        {"b": 2, "c": 4},
        {"a": 1, "c": 4},
        {"a": 1, "b": 2, "c": 5},
    ],
    ids=["all", "rolled back", "undeleted", "delete not there yet"],
)
def test_legal_trees(history: History, tree: dict[str, int | None]) -> None:
    assert history.faults(tree) == []


@pytest.mark.parametrize(
    ("tree", "fault"),
    [
        ({"b": 2}, "c is gone"),
        ({"a": 1, "b": 2, "c": None}, "c is torn"),
        ({"a": 1, "b": 1, "c": 4}, "b holds 1"),
        ({"c": 5}, "a was deleted by 3, but b lost 2"),
    ],
    ids=["promised", "torn", "another file's", "delete outlived its reason"],
)
def test_illegal_trees(history: History, tree: dict[str, int | None], fault: str) -> None:
    assert any(fault in found for found in history.faults(tree)), history.faults(tree)


def test_archive_shows_a_prefix(history: History) -> None:
    assert history.faults({"a": 1}, archive=True) == []
    assert history.faults({"a": 1, "b": 2}, archive=True) == []
    assert history.faults({"b": 2, "c": 5}, archive=True) == []
    assert "b is behind" in history.faults({"c": 4}, archive=True)[0]
    assert "b is behind" in history.faults({}, archive=True)[0]  # the delete of a is there


def test_renames_carry_contents_along() -> None:
    history = History()
    history.save("tmp")
    history.save("latest")
    history.flushed("latest")
    history.rename("tmp", "latest")
    assert history.faults({"latest": 1}) == []
    assert history.faults({"tmp": 1, "latest": 2}) == []
    assert history.faults({"latest": 2}) == []
    assert history.faults({"tmp": 1}) != []
    history.rename_directory("d", "e")
    history.save("d/x")
    history.rename_directory("d", "e")
    assert history.faults({"latest": 1, "e/x": 5}) == []
    assert history.now("d/x") is None


def test_a_lost_rewrite_leaves_the_file_at_its_new_name_with_what_it_held_before() -> None:
    history = History()
    history.save("a")
    history.file_flushed("a")
    history.save("a")
    history.rename("a", "b")
    assert history.faults({"b": 1}) == []
    assert history.faults({"b": 2}) == []
    assert "b holds 1" in history.faults({"b": 1}, archive=True)[0]
    history.file_flushed("b")
    assert "b holds 1" in history.faults({"b": 1})[0]


def test_what_was_rewritten_counts_for_deletes_before_that() -> None:
    history = History()
    for path in "ab":
        history.save(path)
        history.file_flushed(path)
    history.save("a")
    history.unlink("b")
    assert "b was deleted by 4, but a lost 3" in history.faults({"a": 1})[0]
    history.save("a")
    assert "b was deleted by 4, but a lost 3" in history.faults({"a": 1})[0]
    assert history.faults({"a": 5}) == []


def test_a_promise_to_a_file_holds_at_any_of_its_names() -> None:
    history = History()
    history.save("a")
    history.save("b")
    history.rename("a", "b")
    history.file_flushed("b")
    assert history.faults({"a": 1, "b": 2}) == []
    assert history.faults({"b": 1}) == []
    assert "b is gone" in history.faults({"b": 2})[0]
    history.unlink("b")
    assert history.faults({}) == []


def test_what_was_never_durable_stays_deleted() -> None:
    history = History()
    history.save("a")
    history.flushed("a")
    history.rename("a", "b")
    history.save("a")
    history.save("c")
    history.unlink("a")
    assert history.faults({"b": 1}) == []
    assert history.faults({"a": 3, "b": 1, "c": 4}) == []


def test_a_newer_content_may_be_at_a_name_that_its_file_had_before() -> None:
    """The rename was undone, and what was written after it is durable."""
    history = History()
    history.save("a")
    history.rename("a", "b")
    history.save("b")
    history.save("c")
    assert history.faults({"a": 3, "c": 4}) == []
    assert history.faults({"a": 4}) != []


def test_what_was_lost_of_a_file_that_was_renamed_here_is_what_it_held_later() -> None:
    """Not what another file lost that had the name before."""
    history = History()
    history.save("a")
    history.file_flushed("a")
    history.save("b")
    history.file_flushed("b")
    history.save("c")
    history.unlink("b")
    history.unlink("c")
    history.save("a")
    history.rename("a", "b")
    assert history.faults({"b": 1}) == []
    history.save("d")
    history.file_flushed("d")
    history.unlink("d")
    assert "d was deleted by 9, but b lost 7" in history.faults({"b": 1})[0]


def test_a_file_may_be_in_its_directory_whose_rename_was_undone() -> None:
    history = History()
    history.save("d/a")
    history.rename_directory("d", "e")
    history.save("e/b")
    assert history.faults({"d/a": 1, "d/b": 3}) == []
    assert history.faults({"d/a": 3}) != []


@pytest.fixture
def rotated() -> History:
    """log: 1, renamed to log.1 by 2, and 3, which was flushed; other: 4."""
    made = History()
    made.save("log")
    made.rename("log", "log.1")
    made.save("log")
    made.file_flushed("log")
    made.save("other")
    return made


def test_a_file_whose_name_is_anothers_again_is_beside_it(rotated: History) -> None:
    assert rotated.faults({"log": 1, "log.recovered": 3}) == []
    assert rotated.faults({"log": 1, "log.recovered-2": 3}) == []
    assert any("was promised" in fault for fault in rotated.faults({"log": 1}))
    for path, held, fault in (("log.recovered", 4, "holds 4"), ("new", 3, "holds 3"), ("log.recovered", None, "torn")):
        assert any(fault in found for found in rotated.faults({"log": 1, path: held})), (path, held)
