"""Asking a server what it offers, and the command line in front of it."""

from pathlib import Path

import pytest

from loadtest.__main__ import build_parser, main
from loadtest.options import terms_of
from loadtest.target import (
    Offer,
    TargetError,
    characters_per_token,
    headers,
    read_key,
    read_offers,
)
from tests.loadtest_stub import LADDER, running_stub
from tests.server_process import free_port


def test_models_and_ladders_are_read() -> None:
    with running_stub() as stub:
        assert read_offers(stub.url + "/") == [
            Offer("talker", "generate", LADDER, max_tokens=64),
            Offer(
                *("judge", "classify", LADDER, None),
                examples=("ham", "spam"),
                labels=("good", "bad"),
                efforts=("low",),
            ),
        ]


@pytest.mark.parametrize("end", ["/v1", "/v1/"])
def test_an_address_may_be_that_of_an_openai_client(end: str) -> None:
    with running_stub() as stub:
        assert len(read_offers(stub.url + end)) == 2
        options = build_parser().parse_args(["--url", stub.url + end])
        assert options.url == stub.url
        assert terms_of(options, stub.url + end).url == stub.url


def test_how_much_text_a_token_is_can_be_asked() -> None:
    with running_stub() as stub:
        talker, _ = read_offers(stub.url)
        assert characters_per_token(stub.url, talker) == 2.0
        assert stub.bodies[0]["max_tokens"] == 1


def test_a_server_that_is_down_is_told_with_what_to_do() -> None:
    with pytest.raises(TargetError, match=r"No server answers.*make demo.*--url"):
        read_offers(f"http://127.0.0.1:{free_port()}")


def test_another_server_is_not_mistaken_for_ours() -> None:
    with running_stub() as stub, pytest.raises(TargetError, match=r"answered 404: .*not_found"):
        read_offers(stub.url + "/elsewhere")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--duration", "soon"], "write 30s, 2m or 1h30m"),
        (["--duration", ""], "write 30s, 2m or 1h30m"),
        (["--duration", "0m0s"], "write 30s, 2m or 1h30m"),
        (["--users", "0"], "no whole number above 0"),
        (["--max-tokens", "many"], "no whole number above 0"),
        (["--spawn-rate", "nan"], "no number above 0"),
        (["--url", "localhost:8000"], "write http://host:port"),
        (["--shapes", "x"], "unrecognized arguments: --shapes x; did you mean --shape?"),
        (["--rate", "50..0"], "is no rate; write requests per second"),
        (["--rate", "5", "--shape", "closed"], "--rate is for an open loop"),
        (["--shape", "bursty"], "needs --rate"),
        (["--shape", "replay"], "needs --trace"),
        (["--trace", "x.csv", "--rate", "1..2"], "along a ramp"),
        (["--apart"], "--apart is for an open loop"),
        (["--rate", "5", "--think-time", "1"], "--think-time is for a closed loop"),
        (["--think-time", "exp:0"], "is no think time; write seconds"),
        (["--max-in-flight", "5"], "--max-in-flight is for an open loop"),
        (["--rate", "5..9", "--requests", "5"], "--requests does not go with a ramp"),
        (["--users", "1", "--workers", "2", "--requests", "5"], "one of --users at least"),
        (["--rate", "5", "--workers", "3", "--max-in-flight", "2"], "as many at least"),
        (["--objective", "p99<5"], "is no limit. Write limits such as"),
        (["--find-capacity"], "--find-capacity needs --objective"),
        (["--prompt-tokens", "9..3"], "is no number of tokens"),
        (["--keep-requests"], "needs --out"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2
    assert says in capsys.readouterr().err


def test_no_server_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", f"http://127.0.0.1:{free_port()}"]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_a_mix_the_server_cannot_answer_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with running_stub() as stub:
        assert main(["--url", stub.url, "--mix", "generate:3=1"]) == 2
        assert stub.bodies == []
    assert "Step counts: talker: 1, 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:abc", "http://[::1", "http://a b", "http://a?x", "ftp://a", "http://a:0"],
)
def test_what_is_no_address_is_told_so(url: str) -> None:
    with pytest.raises(TargetError, match="is no address; write http://host:port"):
        read_offers(url)


def test_a_key_is_read_from_its_file_and_a_password_in_an_address_refused(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("sd-1234\n", encoding="utf-8")
    assert headers(read_key(str(file)))["Authorization"] == "Bearer sd-1234"
    assert read_key("") is None
    file.write_text("two words", encoding="utf-8")
    with pytest.raises(TargetError, match="must hold one API key"):
        read_key(str(file))
    with pytest.raises(TargetError, match="--api-key-file"):
        read_offers("http://me:secret@127.0.0.1:1")
