"""Event files: every kind of value, cutting back, torn records."""

import math

import pytest
from nemo_rl_cpp.loggers import tensorboard as tb_events
from nemo_rl_cpp.loggers.tensorboard import SummaryWriter


def parse(folder):
    path = next(folder.glob(tb_events.PATTERN))
    return [event for _, event in tb_events.records(path.read_bytes())]


def test_scalars_histograms_and_hparams_are_read_back_by_a_parser(tmp_path):
    file = SummaryWriter(tmp_path)
    for tag, value in (("a (b)", 1.5), ("a [b]", 2.5), ("长/", math.nan), ("c", 1e300), ("\ud800", 1.0)):
        file.add_scalar(tag, value, 300)
    file.add_histogram("h", [1.0, 2.0, 2.0, 4.0], 1 << 40)
    file.add_hparams({"t": "ünï"}, {})
    file.flush()
    file.close()
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


def test_resumed_writer_appends_to_the_same_event_file(tmp_path):
    for step in (1, 2):
        file = SummaryWriter(tmp_path)
        file.add_scalar("x", step, step)
        file.close()
        file.close()
    assert len(list(tmp_path.iterdir())) == 1
    assert [event.step for event in parse(tmp_path)] == [0, 1, 2]


@pytest.mark.parametrize("cut", [1, 5, 13, 20])
def test_incomplete_record_is_removed_before_the_next_is_written(tmp_path, cut):
    file = SummaryWriter(tmp_path)
    file.add_scalar("x", 1, 1)
    file.add_scalar("x", 2, 2)
    file.close()
    file.path.write_bytes(file.path.read_bytes()[:-cut])
    file = SummaryWriter(tmp_path)
    file.add_scalar("x", 3, 3)
    file.close()
    assert [event.step for event in parse(tmp_path)] == [0, 1, 3]
