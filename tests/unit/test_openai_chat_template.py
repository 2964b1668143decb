"""Chat templates: what they may do, and which bundles and messages are refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from serve.bundle import Bundle, BundleError, open_staging, read_bundle, seal_bundle
from serve.errors import Unprocessable
from serve.inputs.chat import MAX_TEMPLATE_BYTES, ChatTemplate, Message
from tests.fixtures.tiny_bundles import restage
from tests.fixtures.tiny_folders import generate_bundle

FILE = "chat_template.jinja"
HELLO = [Message("user", "Who?", "Ann")]


def bundle_with(folder: Path, template: bytes) -> Bundle:
    plain = generate_bundle()
    tokenizer = replace(plain.manifest.text_tokenizer, chat_template=FILE)
    with open_staging(folder) as staging:
        restage(plain, staging)
        (staging / FILE).write_bytes(template)
        seal_bundle(staging, replace(plain.manifest, tokenizer=tokenizer), folder)
    return read_bundle(folder)


def test_a_template_of_a_bundle_is_read_and_hashed(tmp_path: Path) -> None:
    bundle = bundle_with(tmp_path / "one", "{{ messages[0].name }}: é".encode())
    assert FILE in bundle.manifest.files
    assert bundle.chat_template_path == bundle.folder / FILE
    assert ChatTemplate.of(bundle).prompt(HELLO) == "Ann: é"
    (bundle.folder / FILE).write_bytes("{{ messages[0].nome }}: é".encode())
    with pytest.raises(BundleError, match="is altered"):
        read_bundle(bundle.folder)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (b"{% for %}", "is no chat template: Expected an expression.* in line 1"),
        (b"one\n{{ x", "in line 2"),
        (b"{{ x | nothing }}", "No filter named 'nothing'"),
        (b"\xff\xfe", "is not UTF-8"),
        (b" " * (MAX_TEMPLATE_BYTES + 1), "is larger than 65536 bytes"),
    ],
)
def test_a_malformed_template_is_refused(tmp_path: Path, template: bytes, problem: str) -> None:
    bundle = bundle_with(tmp_path / "one", template)
    with pytest.raises(BundleError, match=problem) as refusal:
        ChatTemplate.of(bundle)
    assert str(refusal.value).startswith(f"{bundle.folder / FILE}: ")


def test_what_templates_may_use() -> None:
    source = (
        "{% for m in messages %}\n  {% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{{ m | tojson }}{{ bos_token }}{% endfor %}|{{ add_generation_prompt }}"
    )
    written = ChatTemplate(source, "m").prompt([Message("user", "<é>"), Message("user", "no")])
    assert written == '{"role": "user", "content": "<é>"}|True'


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('only questions') }}", "does not take them: only questions"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "is unsafe|cannot write them"),
        ("{{ messages.append(1) }}", "is unsafe|cannot write them"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{% for i in range(99999) %}" + 99 * "x" + "{% endfor %}", "more than 4194304 characters"),
        ("{% for i in range(1000000000) %}{% endfor %}", "Range too big"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ],
)
def test_what_templates_may_not(source: str, says: str) -> None:
    with pytest.raises(Unprocessable, match=says) as refusal:
        ChatTemplate(source, "m").prompt(HELLO)
    assert refusal.value.param == "messages" and len(refusal.value.message) < 600


def test_messages_are_never_run() -> None:
    text = "{{ 7 * 7 }}{% raw %}"
    assert ChatTemplate.of(generate_bundle()).prompt([Message("user", text)]) == (
        f"User: {text}\n\nAssistant:"
    )


@pytest.mark.parametrize("source", ["{{ 'a' * 10000000000 }}", "{{ 9 ** 999999999 }}"])
def test_a_template_cannot_fill_the_memory_with_one_product(source: str) -> None:
    with pytest.raises(Unprocessable, match="multiply numbers only"):
        ChatTemplate(source, "m").prompt(HELLO)
    assert ChatTemplate("{{ 6 * 7 }}", "m").prompt(HELLO) == "42"
