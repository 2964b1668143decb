"""Who holds a key, what of a key is kept, and how much a key may do."""

import hashlib
import hmac
from pathlib import Path

import pytest

from serve.budget import BudgetRequest, decide, decide_within
from serve.errors import (
    ConcurrencyLimited,
    ImpossibleBudget,
    RateLimited,
    StepsForbidden,
    TokensForbidden,
    TokensLimited,
)
from serve.keys import Holder, Key, Keys, KeysError, NewKey, secret_of
from tests.fixtures.tiny_folders import classify_bundle, generate_bundle

SECRET = "sd-a-key-that-only-this-test-knows"
OTHER = "sd-another-key-that-this-test-knows"


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def block(secret: str = SECRET, name: str = "alice", more: str = "") -> str:
    return f'[[key]]\nname = "{name}"\nsha256 = "{digest(secret)}"\n{more}\n'


def written(folder: Path, text: str) -> Path:
    path = folder / "keys.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_without_keys_there_are_none() -> None:
    assert not Keys(environ={}).in_use
    assert Keys(environ={}).holder_of(SECRET.encode()) is None


def test_keys_of_the_environment() -> None:
    keys = Keys(environ={"STEPDIAL_API_KEYS": f"{SECRET}, {OTHER}"})
    assert keys.in_use
    found = [keys.holder_of(secret.encode()) for secret in (SECRET, OTHER)]
    assert [one and one.key.name for one in found] == ["environment-1", "environment-2"]
    wrong = [SECRET[:-1], SECRET + "x", SECRET.upper(), "", digest(SECRET), "x" * 10_000, "é" * 9]
    assert [keys.holder_of(secret.encode()) for secret in wrong] == [None] * len(wrong)


def test_keys_of_a_file_and_what_they_may_do(tmp_path: Path) -> None:
    limits = (
        "max_steps = 2\nrequests_per_s = 0.5\nburst = 3\nmax_concurrent = 4\ntokens_per_min = 600"
    )
    path = written(tmp_path, block(more=limits) + block(OTHER, "bob"))
    keys = Keys(path, environ={"STEPDIAL_API_KEYS": "sd-and-one-of-the-environment"})
    alice, bob = keys.holder_of(SECRET.encode()), keys.holder_of(OTHER.encode())
    assert alice and alice.key == Key(
        name="alice",
        sha256=digest(SECRET),
        max_steps=2,
        requests_per_s=0.5,
        burst=3,
        max_concurrent=4,
        tokens_per_min=600,
    )
    assert bob and (bob.key.name, bob.key.max_steps) == ("bob", None)
    assert keys.holder_of(b"sd-and-one-of-the-environment") is not None


def test_a_new_key_opens_and_only_its_digest_is_written(tmp_path: Path) -> None:
    new = NewKey.draw("alice")
    assert new.secret not in new.block and len(new.secret) > 40
    keys = Keys(written(tmp_path, new.block), environ={})
    found = keys.holder_of(new.secret.encode())
    assert found and found.key.name == "alice"
    assert NewKey.draw("alice").secret != new.secret
    with pytest.raises(KeysError, match="name"):
        NewKey.draw('a"\nb')


@pytest.mark.parametrize(
    "text", ["", " ", ",", SECRET + ",", "short", "a key with some spaces in it"]
)
def test_a_variable_without_usable_keys_never_opens_the_server(text: str) -> None:
    with pytest.raises(KeysError, match="STEPDIAL_API_KEYS is not 20 to 256") as refused:
        Keys(environ={"STEPDIAL_API_KEYS": text})
    assert not text.strip(" ,") or text.strip(" ,") not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "at least one"),
        ("key = []", "at least one"),
        ("key = 1", "tables"),
        (f'[[keys]]\nname = "{SECRET}"', "tables"),
        (f"key = {SECRET}", "not TOML"),
        (f'[[key]]\nname = "alice"\nsha256 = "{SECRET}"', "key 1 of .*sha256"),
        (f'[[key]]\nname = "alice"\nkey = "{SECRET}"', "key 1 of .*sha256"),
        (block() + f'[[key]]\nname = "bob"\nsecret = "{SECRET}"', "key 2 of .*"),
        (block(more="max_steps = 0"), "max_steps"),
        (block(more="requests_per_s = -1"), "requests_per_s"),
        (block(more="requests_per_s = nan"), "requests_per_s"),
        (block(more="max_step = 2"), "max_step: .*max_steps, requests_per_s"),
        (block() + block(OTHER), "same name"),
        (block() + block(name="bob"), "'alice' and 'bob' have the same sha256"),
    ],
)
def test_files_that_cannot_be_used_say_so_and_show_no_key(
    tmp_path: Path, text: str, says: str
) -> None:
    with pytest.raises(KeysError, match=says) as refused:
        Keys(written(tmp_path, text), environ={})
    assert SECRET not in str(refused.value)


def test_the_header_that_is_for_keys_alone_comes_first() -> None:
    own, other = (b"x-api-key", b"own"), (b"authorization", b"Bearer none")
    assert secret_of([own, other]) == secret_of([other, own]) == b"own"
    assert secret_of([other]) == b"none" and secret_of([(b"accept", b"*/*")]) is None


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666, 0o777])
def test_a_file_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path, block())
    for readable in (0o600, 0o644, 0o440):
        path.chmod(readable)
        keys = Keys(path, environ={})
        assert keys.in_use
    path.chmod(mode)
    with pytest.raises(KeysError, match=f"run `chmod go-w {path}`"):
        Keys(path, environ={})
    with pytest.raises(KeysError):
        keys.read_again()
    assert keys.in_use  # as they were


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(KeysError, match=r"nowhere\.toml: No such file"):
        Keys(tmp_path / "nowhere.toml", environ={})


def test_a_file_is_read_again_and_whoever_stays_keeps_count(tmp_path: Path) -> None:
    path = written(tmp_path, block(more="max_concurrent = 1") + block(OTHER, "bob"))
    keys = Keys(path, environ={})
    alice = keys.holder_of(SECRET.encode())
    assert alice is not None
    alice.enter()
    written(tmp_path, block(more="max_concurrent = 2"))
    keys.read_again()
    assert keys.holder_of(OTHER.encode()) is None
    assert keys.holder_of(SECRET.encode()) is alice
    alice.enter()
    with pytest.raises(ConcurrencyLimited):
        alice.enter()
    written(tmp_path, "broken")
    with pytest.raises(KeysError):
        keys.read_again()
    assert keys.holder_of(SECRET.encode()) is alice


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    in_constant_time = hmac.compare_digest

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return in_constant_time(left, right)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    keys = Keys(environ={"STEPDIAL_API_KEYS": f"{SECRET},{OTHER}"})
    for secret in (SECRET, OTHER, "wrong"):
        keys.holder_of(secret.encode())
    digests = [bytes.fromhex(digest(secret)) for secret in (SECRET, OTHER)]
    assert [left for left, _ in compared] == digests * 3
    assert {right for _, right in compared} == {*digests, bytes.fromhex(digest("wrong"))}


def test_a_rate_allows_a_burst_then_says_when_to_come_again() -> None:
    now_s = 100.0
    key = Key(name="alice", sha256=digest(SECRET), requests_per_s=2, burst=3)
    alice = Holder(key, clock=lambda: now_s)
    for _ in range(3):
        alice.enter()
    with pytest.raises(RateLimited) as refused:
        alice.enter()
    assert refused.value.headers() == {"retry-after": "1", "retry-after-ms": "500"}
    now_s += 0.5
    alice.enter()
    with pytest.raises(RateLimited):
        alice.enter()
    now_s += 3600
    for _ in range(3):
        alice.enter()
    with pytest.raises(RateLimited):
        alice.enter()


def test_tokens_are_those_of_a_minute_and_unused_ones_come_back() -> None:
    now_s = 100.0
    key = Key(name="alice", sha256=digest(SECRET), tokens_per_min=600)
    alice = Holder(key, clock=lambda: now_s)
    with pytest.raises(TokensForbidden, match="may have 600 a minute") as forbidden:
        alice.spend_tokens(601)
    assert forbidden.value.status == 403
    alice.spend_tokens(400)
    with pytest.raises(TokensLimited) as refused:
        alice.spend_tokens(300)
    assert refused.value.status == 429
    assert refused.value.headers() == {"retry-after": "10", "retry-after-ms": "10000"}
    alice.return_tokens(100)
    alice.spend_tokens(300)
    now_s += 3600
    alice.return_tokens(600)
    alice.spend_tokens(600)  # and no more than those of a minute
    with pytest.raises(TokensLimited):
        alice.spend_tokens(1)
    now_s += 0.2
    alice.spend_tokens(1)


def test_without_a_limit_tokens_are_free() -> None:
    alice = Holder(Key(name="alice", sha256=digest(SECRET)))
    alice.spend_tokens(10**9)
    alice.return_tokens(1)


def test_requests_at_once_are_limited_until_one_ends() -> None:
    alice = Holder(Key(name="alice", sha256=digest(SECRET), max_concurrent=2))
    alice.enter()
    alice.enter()
    with pytest.raises(ConcurrencyLimited) as refused:
        alice.enter()
    assert refused.value.status == 429 and "retry-after" in refused.value.headers()
    alice.leave()
    alice.enter()


@pytest.mark.parametrize(
    ("budget", "param"),
    [
        (BudgetRequest(steps=4), "steps"),
        (BudgetRequest(effort="max"), "effort"),
        (BudgetRequest(min_steps=4), "min_steps"),
        (BudgetRequest(min_steps=3, deadline_ms=100.0), "min_steps"),
    ],
)
def test_steps_beyond_those_of_a_key_are_forbidden(budget: BudgetRequest, param: str) -> None:
    manifest = generate_bundle().manifest  # steps 1, 2, 4
    with pytest.raises(StepsForbidden, match="the API key may have 2 at most") as refused:
        decide_within(budget, manifest, 2)
    assert (refused.value.param, refused.value.details) == (param, {"max_steps": 2})
    assert decide_within(budget, manifest, 4) == decide(budget, manifest)
    assert decide_within(budget, manifest, None) == decide(budget, manifest)


def test_the_server_chooses_within_the_steps_of_a_key() -> None:
    manifest = classify_bundle().manifest  # steps 1, 2, 4
    for budget in (
        BudgetRequest(),
        BudgetRequest(deadline_ms=100.0),
        BudgetRequest(max_steps=4),
        BudgetRequest(min_steps=1),
    ):
        decision = decide_within(budget, manifest, 3)
        assert (decision.steps, decision.step_choices) == (2, (1, 2))
    assert decide_within(BudgetRequest(max_steps=1), manifest, 3).steps == 1
    assert decide_within(BudgetRequest(steps=2), manifest, 2).reason == "exact"
    with pytest.raises(ImpossibleBudget, match="does not offer 3 steps"):
        decide_within(BudgetRequest(steps=3), manifest, 2)
