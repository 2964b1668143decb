"""What a job carries through the engine, and what comes of it."""

from serve.classification import Classification
from serve.events import Deliver, Event
from serve.generation import Generation
from serve.translation import Translation

Work = Classification | Generation | Translation
Deliveries = list[tuple[Deliver, Event]]
