from nemo_rl_cpp import stages


def test_progress_of_a_setup_stage_is_printed_only_if_the_stage_takes_long(clock, capsys):
    with stages.work("reading", 200.0, always=True) as advance:
        for seconds, amount in ((1.0, 50.0), (2.0, 50.0), (1.0, 10.0), (15.0, 70.0), (0.1, 20.0)):
            clock.now += seconds
            advance(amount)
    assert capsys.readouterr().err == "reading: 50 %, 3 s\nreading: 90 %, 19 s\n"


def test_setup_stage_names_and_progress_are_printed_only_if_output_is_enabled(clock, capsys):
    def read():
        stages.stage("loading torch")
        with stages.work("reading", 2.0) as advance:
            clock.now += 10.0
            advance(1.0)

    read()
    assert capsys.readouterr() == ("", "")
    with stages.stages_shown():
        read()
    assert capsys.readouterr() == ("[  0.0 s] loading torch\n", "reading: 50 %, 10 s\n")
