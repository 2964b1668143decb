"""What the simulated callers say: prompts and texts to classify, in plain ASCII.

Letters, spaces, line ends and basic punctuation only, so that a character model knows them all.
It deliberately knows nothing of the models that will read them.
"""

from collections.abc import Sequence

PROMPTS = (
    "Good morrow, my friend, ",
    "The king hath sent for thee, and ",
    "What news from the harbour?\n",
    "I pray you, tell me ",
    "First Citizen:\nWe have waited ",
    "O gentle night, ",
    "He that would ride at dawn must ",
    "My lord, the letter says ",
)

REVIEWS = (
    "A warm and patient film. The two leads are wonderful together, and the last scene stayed "
    "with me for days.",
    "I wanted to like it, but the story goes nowhere and the jokes were old before the titles "
    "had ended.",
    "Dull, loud and far too long.",
    "One of the best things I have seen this year; go and see it with somebody you love.",
    "The first hour promises a clever mystery. Then the plot gives up, the music swells, and "
    "everybody explains what we had already guessed. The actors do what they can with lines that "
    "no person would ever say, and the camera keeps looking away from the only interesting face "
    "in the room.",
)

HEADLINES = (
    "Central bank leaves interest rates alone as prices rise more slowly than expected",
    "Late goal sends the visitors to the top of the table after a bruising second half",
    "Ministers meet for a second day of talks on the border after a night of shelling",
    "New telescope finds water in the air of a small planet that circles a nearby star",
    "The maker of phone chips said on Monday that its profit had doubled in a year, and that a "
    "new factory would open in the spring.",
)

TEXTS = REVIEWS + HEADLINES


def lengthened(text: str, others: Sequence[str], turn: int, characters: int) -> str:
    """A text of so many characters: this one, then others, cut where it is long enough."""
    size = len(text)
    parts = [text]
    while size < characters:
        turn += 1
        parts.append(others[turn % len(others)])
        size += len(parts[-1]) + 1
    return " ".join(parts)[:characters]
