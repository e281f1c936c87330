# SPDX-License-Identifier: Apache-2.0
"""The texts that make_gguf_goldens.py runs the real models on."""

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived a clockmaker who",
    "def fibonacci(n):\n    ",
    "Q: What is 17 + 25?\nA:",
    "The three laws of thermodynamics state that",
    "List the planets of the solar system in order:\n1. Mercury\n2. Venus\n3.",
    "Dear Professor Lindqvist,\n\nI am writing to ask whether",
    "Le chat est assis sur le tapis et",
    "import numpy as np\n\n# Compute the mean of each column, ignoring NaN values.\n",
    "Water boils at 100 °C at sea level; on a mountain 3,000 m high it boils at",
)
CHAT_PROMPTS = (
    "Name one colour of the rainbow and say why you like it.",
    "Write a haiku about rain.",
)
PERPLEXITY_TEXT = """\
The lighthouse had not been lit for eleven years when Marta Oliveira came to the island with two suitcases and a \
letter from the harbour office. The letter said that the lamp was to be made ready before the winter, that a boat \
would bring oil and flour on the first Monday of each month, and that she should write down the weather three times \
a day. It did not say why the lamp had gone dark, or what had become of the last keeper, and nobody in the village \
would tell her.

She spent the first week cleaning. Salt had eaten the hinges of the gallery door, and gulls had nested in the lens. \
Each of the brass plates had to be taken down, scrubbed with vinegar and sand, and screwed back in its place, and \
there were two hundred and sixteen of them. In the evenings she sat at the kitchen table and read the old log books. \
They began in 1874, in a careful sloping hand, with the direction of the wind and the height of the sea. In 1891 the \
writing changed. In 1902 somebody had started to draw small ships in the margin, one for each that passed, and by \
1910 there were whole pages with nothing but ships.

On the ninth day the fog came. It rolled in from the north at about four o'clock, so thick that she could not see \
the rail of the gallery from the door, and with it came a silence that made her own breathing sound like somebody \
else's. She filled the reservoir, trimmed the wick, and lit the lamp two weeks earlier than she had been told to. \
The light went out over the water and stopped, as if it had met a wall.

A little after midnight she heard an engine. It was slow and uneven, the sound of a small boat feeling its way, and \
it seemed to come first from the east and then from the south. She rang the bell. The engine stopped, and a man's \
voice called out a name that was not hers. She rang again, three strokes and a pause, three strokes and a pause, as \
the book in the kitchen said that one should. When the boat finally touched the landing she was waiting there with a \
lantern and a rope, and the man who climbed out of it was older than anyone she had seen in the village.

"You are not Henrik," he said.

"No," said Marta. "Henrik has been gone for eleven years."

The old man looked up at the light for a long time. "Then I am very late," he said, and he began to unload his boat: \
four barrels of oil, a sack of flour, and a parcel wrapped in sailcloth, with a date on it that neither of them read \
aloud. She took the heavier end of each barrel, and together they carried them up the ninety-four steps, resting at \
every tenth, while the beam turned above them and the fog, very slowly, began to lift.
"""
