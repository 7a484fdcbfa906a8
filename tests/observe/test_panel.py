"""What a person sees while a run goes on."""

import io

from rich.console import Console

from slipstream.observe.panel import Display, Progress, sparkline


def progress(step: int, stage: str = "trains") -> Progress:
    return Progress(
        stage=stage,
        step=step,
        steps=9,
        heldout=["version 0: 31.5% of 200"],
        rewards=[0.1 * i for i in range(step)],
        metrics={"reward/mean": 0.25, "staleness/mean": 0.5, "staleness/max": 2.0},
        trajectories=1234,
        accounts="10 tokens = 10 trained",
        restarts=0,
        why="no complete group [/x]",
    )


def shown(terminal: bool) -> tuple[Display, io.StringIO]:
    out = io.StringIO()
    return Display(Console(file=out, force_terminal=terminal, width=100)), out


def test_without_a_terminal_there_is_one_line_a_step() -> None:
    display, out = shown(terminal=False)
    with display:
        for step in (0, 0, 1, 1, 1, 2):
            display.update(progress(step))
    lines = out.getvalue().splitlines()
    assert lines[0] == "trains"
    assert [line.split()[1] for line in lines[1:]] == ["1/9", "2/9"]
    assert "reward 0.250" in lines[1]


def test_on_a_terminal_there_is_one_panel() -> None:
    display, out = shown(terminal=True)
    with display:
        display.update(progress(3))
        display.say("rollouter-0 ended with signal SIGKILL")
    text = out.getvalue()
    for part in ("3 of 9", "version 0: 31.5% of 200", "1,234", "no complete group [/x]", "ended with signal SIGKILL"):
        assert part in text


def test_a_sparkline_goes_from_least_to_greatest() -> None:
    assert sparkline([]) == ""
    assert sparkline([0.5, 0.5]) == "▁▁"
    assert sparkline([-2.0]) == "▁"
    assert sparkline([-1.0, -3.0]) == "█▁"
    assert sparkline([0, 1, 0.5]) == "▁█▅"
    assert len(sparkline([float(i) for i in range(100)])) == 40
