"""What a job carries through the engine, and what comes of it."""

from serve.engine.classification import Classification
from serve.engine.events import Deliver, Event
from serve.engine.generation import Generation
from serve.engine.translation import Translation

Work = Classification | Generation | Translation
Deliveries = list[tuple[Deliver, Event]]
