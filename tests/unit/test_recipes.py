"""Recipes: every shipped one loads; unknown keys, wrong types and bad values fail by name."""

import re
from pathlib import Path

import pytest

from train.__main__ import main
from train.recipe import (
    GROUPS,
    RecipeError,
    about_recipe,
    grouped_recipes,
    load_recipe,
    needs_data,
    recipe_from,
    recipe_names,
)

SMALL = """
name = "small"
[data]
kind = "parity"
longest = 4
rows = 100
[model]
family = "encoder"
"""


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return str(path)


@pytest.mark.parametrize("name", recipe_names())
def test_shipped_recipes_load_and_survive_json(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe_from(recipe.to_json(), "again") == recipe


def test_overrides_reach_every_type(small: str) -> None:
    recipe = load_recipe(
        small,
        [
            "optim.lr=0.01",
            "optim.batch=4",
            "steps.short=[1, 2]",
            "model.norm=none",
            "data.lowercase=true",
            "data.kind=table",
            "optim.clip=2",
        ],
        data="somewhere",
    )
    assert (recipe.optim.lr, recipe.optim.batch, recipe.optim.clip) == (0.01, 4, 2.0)
    assert recipe.steps.short == (1, 2)
    assert (recipe.model.norm, recipe.data.lowercase, recipe.data.path) == (
        "none",
        True,
        "somewhere",
    )


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("optim.learning_rate=1", "unknown key 'optim.learning_rate'"),
        ("optim.iteration=1", "Did you mean optim.iterations?"),
        ("lr=1", "Did you mean optim.lr?"),
        ("optim.layers=1", "Did you mean model.layers?"),
        ("modle.layers=1", "unknown key 'modle'. Did you mean model?"),
        ("colour=blue", "unknown key 'colour'"),
        ("optim.lr", "write it as key=value"),
        ("optim.lr=fast", "optim.lr must be float"),
        ("optim.batch=1.5", "optim.batch must be int"),
        ("data.lowercase=1", "data.lowercase must be bool"),
        ("model.norm=batch", "model.norm must be one of pre, post, none"),
        ("model=3", "model must be a section"),
        ("name.first=a", "name is a value"),
        ("model.heads=3", "model.width must be a multiple of model.heads"),
        ("steps.short=[16]", "steps.short must be counts from 1 to steps.full"),
        ("steps.short=[]", "steps.short must not be empty"),
        ("optim.transport=-1", "optim.transport must not be negative"),
        ("optim.clip=0.0", "optim.lr and clip must be above 0"),
        ("optim.beta2=1.0", "optim.beta2 must be in"),
        ("data.held_out=1.0", "data.held_out"),
        ("data.head=1000", "must not exceed model.window"),
        ("data.longest=17", "data.longest must be at most 16 for parity"),
        ("data.vocabulary=-1", "data.vocabulary must be at least 3"),
        ("run.threads=-1", "run.threads must be from 1 to 1024"),
        ("run.threads=99999", "run.threads must be from 1 to 1024"),
        ("optim.lr=inf", "optim.lr must be a finite number"),
        ("data.side=6.0", "data.side must be one of 6, 9, not 6.0"),
        ("data.std=[nan]", "data.std must be a finite number"),
        ("steps.short=1,2", "steps.short must be a list like"),
    ],
)
def test_bad_settings_are_refused_by_name(small: str, override: str, sentence: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(sentence)):
        load_recipe(small, [override])


@pytest.mark.parametrize(
    ("overrides", "guilty"),
    [
        (["optim.lr=fast"], "--set 'optim.lr=fast': optim.lr must be float, not 'fast'"),
        (["optim.lr=0.1", "optim.x=1"], "--set 'optim.x=1': unknown key 'optim.x'"),
        (
            ["run.seed=1", "model.heads=3"],
            "--set 'model.heads=3': recipe 'small': model.width must",
        ),
        (["optim.lr=fast", "optim.batch=a"], "--set 'optim.lr=fast', --set 'optim.batch=a': optim"),
        (["model=3"], "--set 'model=3': model must be a section"),
        (["optim.lr"], "--set 'optim.lr': write it as key=value"),
    ],
)
def test_a_bad_setting_is_blamed_on_the_argument_not_on_the_file(
    small: str, overrides: list[str], guilty: str
) -> None:
    with pytest.raises(RecipeError) as refused:
        load_recipe(small, overrides)
    assert str(refused.value).startswith(guilty)


def test_what_the_file_has_wrong_is_blamed_on_the_file(tmp_path: Path) -> None:
    path = tmp_path / "odd.toml"
    path.write_text(SMALL + "\n[optim]\nlr = 'fast'\n")
    with pytest.raises(RecipeError, match=r"odd\.toml: optim\.lr must be float"):
        load_recipe(str(path), ["optim.batch=4"])


@pytest.mark.parametrize("name", ["parity", "listops", "stdlib"])
def test_a_recipe_that_makes_its_data_takes_none(name: str) -> None:
    for given in ({"data": "mine.csv"}, {"overrides": ["data.path=mine.csv"]}):
        with pytest.raises(RecipeError, match=r"makes its own data .* mine\.csv: leave that out"):
            load_recipe(name, **given)


@pytest.mark.parametrize("name", ["shakespeare", "mnist", "multi30k"])
def test_tokens_are_hidden_from_classifiers_of_text_only(name: str) -> None:
    with pytest.raises(RecipeError, match=r"optim\.token_dropout needs model\.family"):
        load_recipe(name, ["optim.token_dropout=0.1"])


def test_both_ends_of_a_text_are_kept_for_one_label_a_text_only() -> None:
    assert load_recipe("classifier", ["data.head=4", "data.tail=4"]).data.tail == 4
    with pytest.raises(RecipeError, match=re.escape("data.head and tail need")):
        load_recipe("tagger", ["data.tail=4"])  # its data is cut to the first tokens


@pytest.mark.parametrize(
    ("name", "override", "sentence"),
    [
        ("tagger", "model.pool=max", "model.pool"),
        ("classifier", "model.tied=true", "model.tied"),
        ("modelnet", "model.attention_dropout=0.1", "model.attention_dropout must be 0"),
        ("n-ode-parity", "model.attention_dropout=0.1", "model.attention_dropout must be 0"),
        ("modelnet", "model.activation_dropout=0.1", "model.activation_dropout must be 0"),
        ("transevolve-imdb", "model.activation_dropout=0.1", "model.activation_dropout must be 0"),
        ("modelnet", "model.activation=relu", "model.activation, project, bias"),
        ("modelnet", "model.bias=false", "model.activation, project, bias"),
        ("ode-transformer", "model.initial=scaled", 'model.initial "scaled"'),
        ("nanogpt", "data.flip=true", "data.shift, flip"),
        ("text", "data.tokenizer_file=mine.json", "data.tokenizer_file"),
        ("stdlib", "data.test=mine.txt", "data.train and test"),
        ("tagger", 'data.text=["a", "b"]', "data.text must be one column"),
        ("parity", "data.nesting=2", "data.shortest and nesting"),
        ("listops", "data.rounds=2", "data.shortest and nesting"),
    ],
)
def test_what_would_do_nothing_is_refused(name: str, override: str, sentence: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(sentence)):
        load_recipe(name, [override])


def test_dropout_of_timed_blocks_is_that_of_a_head() -> None:
    timed = ["model.block=timed", "model.depth=chain", "model.dropout=0.1"]
    assert load_recipe("classifier", timed).model.dropout == 0.1
    with pytest.raises(RecipeError, match=r"model\.dropout must be 0 where model\.block"):
        load_recipe("text", timed)


def test_pairs_are_read_by_byte_pairs_only() -> None:
    with pytest.raises(RecipeError, match=r'data\.tokenizer must be "bpe" for pairs'):
        load_recipe("multi30k", ["data.tokenizer=chars"])


def test_broken_toml_and_missing_keys(tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("name = ")
    with pytest.raises(RecipeError, match="not valid TOML"):
        load_recipe(str(path))
    path.write_text('name = "x"\n[model]\nfamily = "encoder"\n[data]\n')
    with pytest.raises(RecipeError, match=r"missing data\.kind"):
        load_recipe(str(path))


def test_an_unlike_key_gets_no_suggestion(small: str) -> None:
    with pytest.raises(RecipeError) as refused:
        load_recipe(small, ["optim.zzzzzz=1"])
    assert "Did you mean" not in str(refused.value)


def test_a_misspelt_recipe_is_suggested() -> None:
    with pytest.raises(RecipeError, match=r"no recipe 'sentimnt'. Did you mean sentiment\?"):
        load_recipe("sentimnt")
    with pytest.raises(RecipeError, match=r"^there is no file mine/sentimnt.toml$"):
        load_recipe("mine/sentimnt.toml")


def test_recipes_are_listed_once_each_in_their_groups(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = grouped_recipes()
    assert sorted(name for names in groups.values() for name in names) == recipe_names()
    assert list(groups) == list(GROUPS) and all(groups.values())
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["recipes"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) < 100
    for title, names in groups.items():
        part = printed.split(f"{title}\n", 1)[1]
        for name in names:
            mark = "*" if needs_data(name) else " "
            assert f"\n  {name} {mark} " in part and about_recipe(name)[:20] in part


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_says_in_a_sentence_what_it_trains(name: str) -> None:
    about = about_recipe(name)
    assert about.endswith(".") and 15 < len(about) < 200 and "(--data" not in about


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("classifier", True),
        ("tagger", True),
        ("mnist", True),
        ("parity", False),
        ("gpt2-openwebtext", False),
    ],
)
def test_the_list_marks_what_needs_data(name: str, needs: bool) -> None:
    assert needs_data(name) is needs
