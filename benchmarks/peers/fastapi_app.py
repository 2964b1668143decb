"""The model behind FastAPI alone, as its tutorial would have it: a plain function, no batching.

FastAPI runs a plain function in its pool of threads, which is what it advises for work that blocks.
"""

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from benchmarks.peers.labeller import Labeller, port


class Asked(BaseModel):
    text: str


class Answer(BaseModel):
    label: str
    score: float


def app() -> FastAPI:
    """One route."""
    labeller, made = Labeller(), FastAPI()

    @made.post("/classify")
    def classify(asked: Asked) -> Answer:
        return Answer(**labeller.label([asked.text])[0])

    return made


if __name__ == "__main__":
    uvicorn.run(app(), host="127.0.0.1", port=port(), log_level="warning")
