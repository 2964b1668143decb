"""The tokenising step of a Triton repository: texts in, padded tokens out.

Written into the repository as model.py and run by Triton's Python backend. It needs numpy and
tokenizers there; Stepdial need not be installed.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer

# Rows of one length can share a call, so lengths are rounded up.
_BUCKET_TOKENS = 16


class TritonPythonModel:
    """What Triton's Python backend looks for."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the tokenizer beside this file, and its limits from the configuration."""
        parameters = json.loads(args["model_config"])["parameters"]
        facts = {name: entry["string_value"] for name, entry in parameters.items()}
        folder = Path(args["model_repository"]) / args["model_version"]
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        # A caller who writes "<pad>" means these five characters, not padding.
        self._tokenizer.encode_special_tokens = True
        self._pad_id = int(facts["pad_id"])
        self._max_tokens = int(facts["max_tokens"])
        self._head, self._tail = int(facts["head"]), int(facts["tail"])
        special = {self._tokenizer.id_to_token(token) for token in json.loads(facts["special_ids"])}
        self._characters = (
            frozenset(self._tokenizer.get_vocab()) - special if facts["kind"] == "chars" else None
        )

    def execute(self, requests: list[Any]) -> list[Any]:
        """An answer to each request: tokens (B, N) of texts (B, 1)."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        texts = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()  # (B, 1)
        try:
            rows = [self._encode(text) for text in texts.reshape(-1)]
        except ValueError as error:
            return pb_utils.InferenceResponse(
                output_tensors=[], error=pb_utils.TritonError(str(error))
            )
        tensor = pb_utils.Tensor("tokens", self._padded(rows))
        return pb_utils.InferenceResponse(output_tensors=[tensor])

    def _encode(self, data: bytes) -> list[int]:
        text = data.decode("utf-8")
        if not text:
            raise ValueError("text is empty: send some text")
        if self._characters is not None and not self._characters.issuperset(text):
            unknown = next(one for one in text if one not in self._characters)
            raise ValueError(f"text has the character {unknown!r}, which the model does not know")
        tokens: list[int] = self._tokenizer.encode(text).ids
        if not tokens:
            raise ValueError("text holds nothing that the model can read")
        if len(tokens) <= self._head + self._tail:
            return tokens
        return tokens[: self._head] + tokens[len(tokens) - self._tail :]

    def _padded(self, rows: list[list[int]]) -> npt.NDArray[np.int64]:
        longest = max(map(len, rows))
        length = min(-(-longest // _BUCKET_TOKENS) * _BUCKET_TOKENS, self._max_tokens)
        tokens = np.full((len(rows), length), self._pad_id, dtype=np.int64)  # (B, N)
        for index, row in enumerate(rows):
            tokens[index, : len(row)] = row
        return tokens
