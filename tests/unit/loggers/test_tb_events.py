import math

import pytest
from nemo_rl_cpp.loggers import tensorboard as tb_events
from nemo_rl_cpp.loggers.tensorboard import TensorboardLogger


def parse(folder):
    path = next(folder.glob(tb_events.PATTERN))
    return [event for _, event in tb_events.records(path.read_bytes())]


def test_written_tensorboard_scalars_histograms_and_hyperparameters_are_read_back_by_a_parser(tmp_path):
    file = TensorboardLogger({}, tmp_path)
    file.log_metrics({"a (b)": 1.5, "a [b]": 2.5, "长/": math.nan, "c": 1e300, "\ud800": 1.0}, 300)
    file.log_histogram([1.0, 2.0, 2.0, 4.0], 1 << 40, "h")
    file.log_hyperparams({"t": "ünï"})
    file.flush()
    file.finish()
    version, *scalars, bars, text = parse(tmp_path)
    assert version.file_version == "brain.Event:2" and version.wall_time > 1e9
    values = {event.summary.value[0].tag: event.summary.value[0].simple_value for event in scalars}
    assert {event.step for event in scalars} == {300} and values["a (b)"] == 1.5 and values["a [b]"] == 2.5
    assert math.isnan(values["长/"]) and values["c"] > 3e38 and values["?"] == 1.0
    histo = bars.summary.value[0].histo
    assert bars.step == 1 << 40 and (histo.min, histo.max, histo.num, histo.sum, histo.sum_squares) == (1, 4, 4, 9, 25)
    assert sum(histo.bucket) == 4 and len(histo.bucket) == len(histo.bucket_limit) and histo.bucket_limit[-1] >= 4
    text = text.summary.value[0]
    assert text.tag == "hyperparams/text_summary" and "t: ünï" in text.tensor.string_val[0].decode()
    assert text.metadata.plugin_data.plugin_name == "text" and text.tensor.tensor_shape.dim[0].size == 1


@pytest.mark.parametrize("cut", [0, 1, 5, 13, 20])
def test_resumed_run_removes_an_incomplete_tensorboard_record_and_appends_to_the_file(tmp_path, cut):
    for step in (1, 2, 3):
        file = TensorboardLogger({}, tmp_path)
        file.log_metrics({"x": step}, step)
        file.finish()
        file.finish()
        if step == 2 and cut:
            file.path.write_bytes(file.path.read_bytes()[:-cut])
    assert len(list(tmp_path.iterdir())) == 1
    assert [event.step for event in parse(tmp_path)] == ([0, 1, 3] if cut else [0, 1, 2, 3])
