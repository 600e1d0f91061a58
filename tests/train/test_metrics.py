"""Sinks for the numbers of each step."""

import json

from fast_llm_ssm.train.metrics import JsonLines, TensorBoard


def steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_rows_after_the_step_gone_on_from_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path, 0)
    for step in range(1, 6):
        sink.write({"step": step, "loss": 1 / step})
    sink.close()
    path.open("a").write('{"step": 6, "lo')  # the process was killed here
    sink = JsonLines(path, 3)
    sink.write({"step": 4, "loss": 0.5})
    sink.close()
    assert steps(path) == [1, 2, 3, 4]
    assert json.loads(path.read_text().splitlines()[3])["loss"] == 0.5
    assert [child.name for child in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_whole_file_without_its_last_newline_loses_only_that_row(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    JsonLines(path, 2).close()
    assert steps(path) == [1]


def test_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for begin, value in ((0, 1.0), (2, 2.0)):
        sink = TensorBoard(tmp_path, begin)
        for step in range(begin + 1, begin + 4):
            sink.write({"step": step, "loss": value})
        sink.close()
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    scalars = [(event.step, event.value) for event in accumulator.Scalars("loss")]
    assert scalars == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]
