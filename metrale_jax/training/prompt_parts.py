# SPDX-License-Identifier: Apache-2.0
"""What the built-in prompts are made of: subjects, and the forms that ask about them."""

THINGS = tuple(
    part.strip()
    for part in """
    photosynthesis; gravity; the water cycle; volcanoes; earthquakes; the moon's phases; black holes; the solar system;
    rainbows; lightning; tides; glaciers; coral reefs; deserts; rainforests; evolution; DNA; vaccines; antibiotics;
    the human heart; the immune system; sleep; memory; dreams; the brain; digestion; nutrition; vitamins; exercise;
    stress; meditation; yoga; electricity; magnets; batteries; solar panels; wind turbines; nuclear power; engines;
    airplanes; bicycles; trains; bridges; skyscrapers; the printing press; the telephone; radio; television; computers;
    the internet; search engines; email; smartphones; cameras; robots; artificial intelligence; machine learning;
    neural networks; databases; spreadsheets; operating systems; encryption; passwords; open source software;
    the scientific method; statistics; probability; algebra; geometry; calculus; prime numbers; fractions; the metric
    system; money; banks; inflation; interest rates; stocks; taxes; budgets; supply and demand; trade; insurance;
    entrepreneurship; marketing; advertising; leadership; teamwork; time management; negotiation; job interviews;
    resumes; public speaking; note taking; studying; reading; writing; poetry; novels; newspapers; libraries; museums;
    painting; sculpture; photography; film; theatre; dance; jazz; classical music; opera; folk songs; the piano;
    the guitar; the violin; drums; football; basketball; tennis; swimming; running; hiking; climbing; sailing; chess;
    board games; video games; cooking; baking bread; coffee; tea; chocolate; cheese; rice; pasta; soup; salads; spices;
    gardening; trees; flowers; bees; butterflies; ants; spiders; birds; owls; eagles; penguins; whales; dolphins;
    sharks; elephants; lions; wolves; bears; cats; dogs; horses; cows; chickens; the ancient Egyptians; ancient Greece;
    the Roman Empire; the Middle Ages; the Renaissance; the Industrial Revolution; the Silk Road; the Vikings;
    the French Revolution; the American Civil War; the First World War; the Cold War; the space race; democracy;
    constitutions; elections; human rights; the United Nations; climate change; recycling; pollution; deforestation;
    renewable energy; water conservation; public transport; cities; villages; farms; mountains; rivers; oceans;
    islands; maps; compasses; calendars; clocks; language; grammar; translation; philosophy; ethics; happiness;
    friendship; families; childhood; education; teachers; schools; universities; travel; hotels; airports; festivals;
    weddings; holidays; gifts; fashion; shoes; furniture; houses; kitchens; tools; paint; glass; paper; plastic; steel;
    gold; diamonds; salt; sugar; oil; fire; ice; snow; rain; clouds; the stars; telescopes; microscopes; thermometers
    """.replace("\n", " ").split(";")
)

PLACES = tuple(
    "Japan, Brazil, Kenya, Norway, Italy, Mexico, India, Egypt, Canada, Australia, Peru, Greece, Iceland, Morocco, "
    "Vietnam, Turkey, Spain, Ireland, Poland, Argentina, Thailand, Nepal, Portugal, Chile, South Korea, New Zealand, "
    "Paris, London, New York, Rome, Tokyo, Cairo, Berlin, Istanbul, Lisbon, Prague".split(", ")
)

PEOPLE = tuple(
    "a lighthouse keeper, a young inventor, two old friends, a lost astronaut, a shy dragon, a baker, a detective, "
    "a robot who wants to paint, a grandmother, a street musician, a librarian, a fisherman, a clever fox, "
    "a train driver, a gardener, a new student, a clockmaker, a curious child, a retired sailor, a nurse, a shepherd, "
    "a cartographer, a violin maker, a mail carrier, a beekeeper".split(", ")
)

MOODS = tuple("funny, sad, hopeful, mysterious, peaceful, exciting, strange, warm".split(", "))

ROLES = tuple(
    "a teacher, a doctor, a software engineer, a chef, a small business owner, a student, a parent, a scientist, "
    "a journalist, a designer, a farmer, a traveler, a beginner, a ten-year-old, a manager, a musician".split(", ")
)

TASKS = tuple(
    "reverses a string, checks whether a number is prime, computes the factorial of a number, sorts a list, "
    "finds the largest number in a list, counts the words in a text, removes duplicates from a list, "
    "checks whether a word is a palindrome, returns the nth Fibonacci number, merges two sorted lists, "
    "converts Celsius to Fahrenheit, reads a file line by line, counts the vowels in a string, "
    "sums the digits of a number, finds the average of a list, searches a sorted list, flattens a nested list, "
    "groups words by their first letter, finds the greatest common divisor of two numbers, transposes a matrix, "
    "validates an email address, generates a random password, computes the area of a circle, "
    "counts how often each letter occurs, rotates a list by k places, finds the second largest element, "
    "checks whether two words are anagrams, prints a multiplication table, parses a date, "
    "writes a dictionary to JSON".split(", ")
)

LANGUAGES = ("Python", "Python", "Python", "JavaScript", "Java", "C", "Go", "Rust", "SQL", "Bash")

SENTENCES = tuple(
    part.strip()
    for part in """
    the meeting was moved to thursday because the manager had to travel; she dont like going to the market on sundays;
    the results of the experiment were not what we expected; we was very happy to see the new garden;
    our team finished the project two weeks before the deadline; he have three brothers and one sister;
    the train leaves at seven in the morning and arrives before noon; i forgot my umbrella and got completely wet;
    the new library has more than forty thousand books; please send me the report until friday;
    the children was playing in the park when it started to rain; this phone is more better than the old one;
    customers complained that the delivery took too long; they goes to school by bus every day;
    the cake tasted good but it was too sweet for my father; the company plans to open three offices next year;
    the museum is closed on mondays and on public holidays; we need to talk about the budget for the next quarter;
    the old bridge was repaired by volunteers last summer; my computer is slow since i installed the update
    """.replace("\n", " ").split(";")
)

# `{thing}` and the like are drawn from the lists above; `{a}`, `{b}`, `{n}` are numbers.
FORMS = (
    "What is {thing}?",
    "Explain {thing} in simple terms.",
    "Explain {thing} to {role}.",
    "Give me five interesting facts about {thing}.",
    "List the main advantages and disadvantages of {thing}.",
    "Write a short paragraph about {thing}.",
    "Summarize the history of {thing}.",
    "Why is {thing} important?",
    "How does {thing} affect our daily lives?",
    "What are common misconceptions about {thing}?",
    "Compare {thing} and {thing2}.",
    "How are {thing} and {thing2} connected?",
    "Write a poem about {thing}.",
    "Write a {mood} story about {person} and {thing}.",
    "Write a {mood} short story about {person}.",
    "Write a haiku about {thing}.",
    "Write a blog post introduction about {thing}.",
    "Write an email to a friend about {thing}.",
    "Write a product description that has to do with {thing}.",
    "What questions should {role} ask about {thing}?",
    "Give {role} advice about {thing}.",
    "Make a list of {n} words related to {thing}.",
    "Create a quiz with three questions and answers about {thing}.",
    "What would happen if there were no {thing}?",
    "Describe {thing} using a metaphor.",
    "What is the best way to learn about {thing}?",
    "Name {n} things to remember about {thing}.",
    "Write a dialogue between two people about {thing}.",
    "Write an outline for an essay about {thing}.",
    "Define {thing} in one sentence.",
    "Write a short speech about {thing} for {role}.",
    "What should I know before visiting {place}?",
    "Plan a three-day trip to {place}.",
    "Describe the food of {place}.",
    "Tell me about the culture and history of {place}.",
    "What is the capital of {place} and what is it known for?",
    "Compare {place} and {place2} for a holiday.",
    "What is the weather like in {place}?",
    "Write a travel diary entry about a day in {place}.",
    "Write a {language} function that {task}.",
    "Write a {language} program that {task}, and explain it.",
    "Show me how to write code in {language} that {task}.",
    "Explain step by step how a function that {task} works.",
    "What is {a} plus {b}?",
    "What is {a} times {n}?",
    "If I have {a} apples and give away {n}, how many are left?",
    "A train travels {a} miles in {n} hours. What is its average speed?",
    "Count from {n} to {m}.",
    "List the multiples of {n} up to {b}.",
    "What is {n} percent of {a}? Show your steps.",
    "Correct the grammar of this sentence: {sentence}.",
    "Rewrite this in a more formal tone: {sentence}.",
    "Repeat the following sentence twice: {sentence}.",
    "Translate into French: {sentence}.",
    "Make this sentence longer and more detailed: {sentence}.",
    "Shorten this sentence: {sentence}.",
    "Turn this into a question: {sentence}.",
    "How can {role} become better at {thing}?",
    "Write a recipe that a beginner can cook in {place}.",
    "Write a step-by-step guide to {thing} for {role}.",
    "Hello! Can you help me with {thing}?",
    "I am {role}. What can you tell me about {thing}?",
    "Can you recommend books about {thing}?",
    "Describe a typical day of {role}.",
    "Tell me a joke about {thing}.",
    "Write a letter from {person} to {role}.",
    "What are the steps of learning {thing}?",
    "Give three reasons why people enjoy {thing}.",
    "Write a news article about {thing} in {place}.",
    "What is your opinion on {thing}?",
    "Who invented or discovered {thing}?",
    "Write a song chorus about {thing}.",
)

STARTS = (
    "Once upon a time, {person} found",
    "The history of {thing} begins",
    "In {place}, people often",
    "There are many reasons why {thing}",
    "Chapter 1\n\nIt was a {mood} morning when {person}",
    "{thing} is one of the",
    "The most important thing about {thing} is",
    "How to understand {thing}:\n\n1.",
    'def main():\n    """A program that {task}."""\n',
    "Abstract. We study {thing}",
    "Dear friend,\n\nI am writing to you from {place}",
    "Question: What is {thing}?\nAnswer:",
    "Today we will learn about {thing}.",
    "The main difference between {thing} and {thing2} is",
    "News from {place}:",
    "As {role}, I have always thought that {thing}",
)
