"""The weights of a bundle in memory, read and checked at once, for sessions to be made from.

Left alone, onnxruntime maps the file into memory: whoever writes into it would change the answers
of a server that runs, and whoever cuts it short would end the server. Knows the one file of a
bundle that all its graphs refer to; not what is in it.
"""

from dataclasses import dataclass
from typing import Self, final

import onnxruntime as ort

from serve.bundle import Bundle, read_checked

_IN_PLACE = "session.use_external_initializer_file_buffers_directly"


@final
@dataclass(frozen=True, slots=True)
class Weights:
    """What the file holds; `in_place` if sessions use it where it is, and not a copy of it.

    Whoever opens several sessions with the same weights saves the copies. What onnxruntime brings
    into a form of its own, as most weights, is there twice then, so one set of sessions copies.
    """

    file: str
    content: bytes
    in_place: bool

    @classmethod
    def read(cls, bundle: Bundle, in_place: bool) -> Self:
        """BundleError unless the file is the one that was sealed."""
        file = bundle.manifest.weights
        content = read_checked(bundle.folder / file, bundle.manifest.files[file])
        return cls(file, content, in_place)

    def lend(self, options: ort.SessionOptions) -> None:
        """Have a session take its weights from here."""
        options.add_session_config_entry(_IN_PLACE, str(int(self.in_place)))
        options.add_external_initializers_from_files_in_memory(
            [self.file], [self.content], [len(self.content)]
        )
