"""What the dry run of the workflows finds; the run itself is `nox -s workflows`."""

import pytest

from tools import workflows
from tools.workflows import Script, filled, known_sessions, run, scripts, sessions_of, stand_ins

JOBS = {
    "env": {"WHERE": "everywhere"},
    "jobs": {
        "one": {"steps": [{"uses": "an/action"}, {"run": "echo one"}]},
        "each": {
            "strategy": {"matrix": "..."},
            "steps": [{"run": "echo $S", "env": {"S": "${{ matrix.session }}"}}],
        },
    },
}


def test_each_row_of_a_matrix_is_a_script_of_its_own():
    rows = [{"session": "lint", "python": "3.11"}, {"session": "tests", "python": "3.11"}]
    found = scripts("ci", JOBS, rows)
    assert found[0] == Script("ci one", "echo one", {"WHERE": "everywhere"})
    assert [one.env["S"] for one in found[1:]] == ["lint", "tests"]
    assert found[2].where == "ci each tests"


def test_an_expression_that_nobody_knows_is_an_error():
    assert filled("a ${{ x.y }} b", {"x.y": "1"}) == "a 1 b"
    with pytest.raises(KeyError, match=r"x\.z"):
        filled("${{ x.z }}", {"x.y": "1"})


def test_only_a_candidate_is_announced_as_a_prerelease():
    asked = "${{ needs.build.outputs.kind == 'prerelease' && 'yes' || '' }}"
    told = {"jobs": {"announce": {"steps": [{"run": "true", "env": {"PRERELEASE": asked}}]}}}
    found = [scripts("release", told, [], version)[0].env for version in ("0.1.0", "0.2.0rc1")]
    assert found == [{"PRERELEASE": ""}, {"PRERELEASE": "yes"}]


def test_the_sessions_of_a_command():
    assert sessions_of("python -m nox --reuse-venv never -s gpu") == ["gpu"]
    assert sessions_of("python -m nox -s build isolated\\(rng\\) -- -x") == [
        "build",
        "isolated(rng)",
    ]
    assert sessions_of("python -m pip install nox") == []
    assert {"gpu", "lint", "isolated(rng)", "torches(2.13)"} <= known_sessions()


@pytest.mark.parametrize(
    ("script", "fails"),
    [
        ("python -m tools.tags vescale-rng-v99.0.0", True),
        ("python -m tools.packages --no-such", False),  # has no command line: importing is all
        ("python -m tools.matrix --no-such", True),
        ("echo $NOT_SET", True),
        ("echo 'open", True),
        ("python -m pip install nox && python -m nox -s gone", False),
    ],
)
def test_a_script_is_run(tmp_path, script, fails):
    shims, log = stand_ins(tmp_path / "bin"), tmp_path / "log"
    failed = run(Script("here", script, {}), workflows.ROOT, shims, log)
    assert bool(failed) == fails
    if "gone" in script:
        assert [sessions_of(line) for line in log.read_text().splitlines()] == [[], ["gone"]]
