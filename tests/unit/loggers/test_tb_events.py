"""Our event files against tensorboardX: its message classes read them, its writer's records have our checksums."""

import math

import pytest
from nemo_rl_cpp.loggers import tb_events
from nemo_rl_cpp.loggers.tb_events import EventFile


def parse(folder):
    from tensorboardX.proto.event_pb2 import Event

    path = next(folder.glob(tb_events.PATTERN))
    return [Event.FromString(payload) for _, payload in tb_events.records(path.read_bytes())]


def test_every_kind_of_value_is_read_back(tmp_path):
    file = EventFile(tmp_path)
    file.add(300, [tb_events.scalar("a", 1.5), tb_events.scalar("b", math.nan), tb_events.scalar("c", 1e300)])
    file.add(1 << 40, [tb_events.histogram("h", [1.0, 2.0, 2.0, 4.0])])
    file.add(0, [tb_events.text("t", "ünï"), tb_events.image("i", b"PNG", 640, 480)])
    file.add(1, [])
    file.flush()
    file.close()
    version, scalars, bars, other = parse(tmp_path)
    assert version.file_version == "brain.Event:2" and version.wall_time > 1e9
    values = {v.tag: v.simple_value for v in scalars.summary.value}
    assert scalars.step == 300 and values["a"] == 1.5 and math.isnan(values["b"]) and values["c"] > 3e38
    histo = bars.summary.value[0].histo
    assert bars.step == 1 << 40 and (histo.min, histo.max, histo.num, histo.sum, histo.sum_squares) == (1, 4, 4, 9, 25)
    assert sum(histo.bucket) == 4 and len(histo.bucket) == len(histo.bucket_limit) == 30 and histo.bucket_limit[-1] >= 4
    text, image = other.summary.value
    assert text.tag == "t/text_summary" and text.tensor.string_val[0].decode() == "ünï"
    assert text.metadata.plugin_data.plugin_name == "text" and text.tensor.tensor_shape.dim[0].size == 1
    assert (image.image.width, image.image.height, image.image.encoded_image_string) == (640, 480, b"PNG")


def test_checksums_are_those_of_tensorboardx(tmp_path):
    from tensorboardX.record_writer import masked_crc32c

    file = EventFile(tmp_path)
    file.add(7, [tb_events.scalar("a", 2.0)])
    file.close()
    for record, payload in tb_events.records(file.path.read_bytes()):
        assert record[8:12] == masked_crc32c(record[:8]).to_bytes(4, "little")
        assert record[-4:] == masked_crc32c(payload).to_bytes(4, "little")


def test_files_of_tensorboardx_can_be_cut_back(tmp_path):
    from tensorboardX import SummaryWriter

    writer = SummaryWriter(logdir=str(tmp_path))
    for step in range(5):
        writer.add_scalar("x", step, step)
    writer.close()
    path = next(tmp_path.glob(tb_events.PATTERN))
    tb_events.truncate_events(path, 2)
    assert [tb_events.step_of_event(payload) for _, payload in tb_events.records(path.read_bytes())] == [0, 0, 1, 2]


def test_a_resumed_writer_goes_on_in_the_same_file(tmp_path):
    for step in (1, 2):
        file = EventFile(tmp_path)
        file.add(step, [tb_events.scalar("x", step)])
        file.close()
        file.close()
    assert len(list(tmp_path.iterdir())) == 1
    assert [event.step for event in parse(tmp_path)] == [0, 1, 2]


@pytest.mark.parametrize("cut", [1, 5, 13, 20])
def test_a_torn_record_is_dropped_before_the_next_is_written(tmp_path, cut):
    file = EventFile(tmp_path)
    file.add(1, [tb_events.scalar("x", 1)])
    file.add(2, [tb_events.scalar("x", 2)])
    file.close()
    file.path.write_bytes(file.path.read_bytes()[:-cut])
    file = EventFile(tmp_path)
    file.add(3, [tb_events.scalar("x", 3)])
    file.close()
    assert [event.step for event in parse(tmp_path)] == [0, 1, 3]
