"""Template families of the benchmark: unrelated kinds of documents in which one line refers to another.

A record names an alias (the edit changes it), and rows elsewhere say what each alias stands for. Development families
may be looked at when a selector is made; hold-out families decide.
"""

from __future__ import annotations

from dataclasses import dataclass

PEOPLE = (
    "Okafor", "Lindqvist", "Moreau", "Tanaka", "Alvarez", "Novak", "Petrov", "Haddad", "Silva", "Jensen", "Kowalski",
    "Murphy", "Rossi", "Schmidt", "Yilmaz", "Ferreira", "Nakamura", "Olsen", "Romero", "Weber", "Bianchi", "Fischer",
)  # fmt: skip
COLOURS = ("red", "blue", "green", "white", "black", "orange", "yellow", "purple", "brown", "silver")
RIVERS = ("Danube", "Volga", "Ganges", "Amazon", "Congo", "Jordan", "Indus", "Niger", "Nile", "Rhine", "Seine", "Tiber")
CITIES = ("Lisbon", "Dublin", "Geneva", "Prague", "Munich", "Oslo", "Vienna", "Boston", "Madrid", "Toronto", "Cairo")
FRUIT = ("apple", "lemon", "cherry", "banana", "peach", "orange", "grape", "mango", "melon", "plum", "pear", "olive")
METALS = ("iron", "gold", "silver", "copper", "steel", "lead", "brass", "bronze", "nickel", "zinc", "tin", "chrome")
MONTHS = ("January", "February", "March", "April", "June", "July", "August", "October", "November", "December")


@dataclass(frozen=True)
class Family:
    """One kind of document. Texts hold `{subject}`, `{alias}`, `{value}` and, for chains, `{middle}`."""

    name: str
    holdout: bool
    subjects: tuple[str, ...]
    aliases: tuple[str, ...]
    values: tuple[str, ...]
    record: str
    heading: str  # before the rows where they stand in a document of their own
    row: str  # alias → value
    question: str  # answered by the value
    direct: str  # answered by the alias
    middles: tuple[str, ...] = ()  # chains: alias → middle → value
    first_row: str = ""
    second_heading: str = ""
    second_row: str = ""


FAMILIES = (
    Family(
        "registry",
        False,
        ("billing", "search", "mailing", "booking", "catalogue", "login", "reporting", "backup"),
        ("Helios", "Juniper", "Orion", "Cobalt", "Falcon", "Marble", "Willow", "Saturn", "Amber", "Harbor"),
        RIVERS,
        "# Service registry: {subject}\n\nIts owners review it every quarter, and the engineer on duty keeps notes on "
        "the last restarts. The {subject} service runs in the {alias} zone.\n\n",
        "# Gateways\n\n",
        "- {alias} zone: gateway {value}\n",
        "\n\nQuestion: Through which gateway do requests of the {subject} service pass?\n"
        "Answer: Requests of the {subject} service pass through gateway",
        "\n\nQuestion: In which zone does the {subject} service run?\nAnswer: The {subject} service runs in the",
        ("Granite", "Meadow", "Copper", "Lagoon", "Thunder", "Velvet", "Prairie", "Canyon"),
        "- {alias} zone: {middle} team\n",
        "# Teams\n\n",
        "- {middle} team: gateway {value}\n",
    ),
    Family(
        "accounts",
        False,
        ("Meridian", "Northgate", "Castello", "Bluewater", "Ashford", "Kingsley", "Ferndale", "Rosewood"),
        PEOPLE,
        CITIES,
        "# Account file: {subject}\n\nInvoices go out on the first working day, and complaints are answered within a "
        "week. The {subject} account is looked after by {alias}.\n\n",
        "# Where people sit\n\n",
        "| {alias} | desk in {value} |\n",
        "\n\nQuestion: In which city is the desk that looks after the {subject} account?\nAnswer: The desk is in",
        "\n\nQuestion: Who looks after the {subject} account?\nAnswer: The {subject} account is looked after by",
        ("Granite", "Meadow", "Copper", "Lagoon", "Thunder", "Velvet", "Prairie", "Canyon"),
        "| {alias} | {middle} group |\n",
        "# Groups\n\n",
        "| {middle} group | desk in {value} |\n",
    ),
    Family(
        "catalogue",
        False,
        ("lantern", "kettle", "blanket", "compass", "ladder", "toolbox", "hammock", "thermos"),
        ("cotton", "walnut", "marble", "velvet", "crystal", "bamboo", "leather", "canvas"),
        METALS,
        "# Catalogue entry: {subject}\n\nIt is packed by hand, and broken pieces are replaced without a receipt. The "
        "{subject} belongs to the {alias} class.\n\n",
        "# Labels\n\n",
        "The {alias} class has {value} labels.\n",
        "\n\nQuestion: Which label does the {subject} have?\nAnswer: The {subject} has a label of",
        "\n\nQuestion: To which class does the {subject} belong?\nAnswer: The {subject} belongs to the",
        ("summer", "winter", "harvest", "spring", "festival", "market"),
        "The {alias} class is on the {middle} list.\n",
        "# Lists\n\n",
        "The {middle} list has {value} labels.\n",
    ),
    Family(
        "contracts",
        True,
        ("cleaning", "catering", "security", "courier", "printing", "gardening", "heating", "laundry"),
        ("Standard", "Extended", "Premium", "Reduced", "Seasonal", "Special", "Basic", "Regional"),
        MONTHS,
        "# Contract: {subject}\n\nIt was signed by both parties and is kept in the locked cabinet next to the archive. "
        "The {subject} contract follows the {alias} schedule.\n\n",
        "# Schedules\n\n",
        "* {alias} schedule: renewed in {value}\n",
        "\n\nQuestion: In which month is the {subject} contract renewed?\nAnswer: The {subject} contract is renewed in",
        "\n\nQuestion: Which schedule does the {subject} contract follow?\nAnswer: The {subject} contract follows the",
        ("Maple", "Cedar", "Birch", "Poplar", "Hazel", "Linden", "Spruce", "Laurel"),
        "* {alias} schedule: {middle} desk\n",
        "# Desks\n\n",
        "* {middle} desk: renews in {value}\n",
    ),
    Family(
        "alarms",
        True,
        ("boiler", "freezer", "elevator", "turbine", "generator", "conveyor", "furnace", "compressor"),
        ("Eagle", "Badger", "Otter", "Raven", "Beaver", "Falcon", "Panther", "Bison", "Heron", "Lynx"),
        RIVERS,
        "# Alarm card: {subject}\n\nThe lights on the panel stay on until somebody signs the book beside it. When the "
        "{subject} alarm sounds, call the {alias} crew.\n\n",
        "# Radio channels\n\n",
        "1. {alias} crew, channel {value}\n",
        "\n\nQuestion: On which channel is the crew that is called when the {subject} alarm sounds?\n"
        "Answer: The crew is on channel",
        "\n\nQuestion: Which crew is called when the {subject} alarm sounds?\n"
        "Answer: When the {subject} alarm sounds, call the",
        ("northern", "southern", "eastern", "western", "central", "coastal"),
        "1. {alias} crew, {middle} station\n",
        "# Stations\n\n",
        "1. {middle} station, channel {value}\n",
    ),
    Family(
        "library",
        True,
        ("botany", "geology", "maritime", "heraldry", "theatre", "astronomy", "folklore", "chess"),
        ("Garden", "Tower", "Bridge", "Castle", "Forest", "Mirror", "Anchor", "Temple"),
        PEOPLE,
        "# Collection guide: {subject}\n\nReaders leave their coats at the door and may bring pencils but no pens. The "
        "{subject} collection is kept in the {alias} room.\n\n",
        "# Keepers\n\n",
        "| {value} | {alias} room |\n",
        "\n\nQuestion: Who is the keeper of the room with the {subject} collection?\nAnswer: The keeper is",
        "\n\nQuestion: In which room is the {subject} collection kept?\n"
        "Answer: The {subject} collection is kept in the",
        ("Norman", "Gothic", "Roman", "Baroque", "Tudor", "Georgian", "Moorish"),
        "| {alias} room | {middle} wing |\n",
        "# Wings\n\n",
        "| {value} | {middle} wing |\n",
    ),
    Family(
        "routes",
        True,
        ("eleven", "twelve", "fourteen", "sixteen", "seventeen", "nineteen", "thirteen", "fifteen"),
        ("Holborn", "Camden", "Richmond", "Croydon", "Victoria", "Euston", "Chelsea", "Dulwich", "Brixton", "Hackney"),
        COLOURS,
        "# Duty sheet, line {subject}\n\nDrivers check the tyres and the wipers, and write down the first reading of "
        "the counter. Buses of line {subject} start from the {alias} depot.\n\n",
        "# Paint\n\n",
        "Buses of {alias} depot: painted {value}.\n",
        "\n\nQuestion: In which colour are the buses of line {subject} painted?\n"
        "Answer: The buses of line {subject} are painted",
        "\n\nQuestion: From which depot do buses of line {subject} start?\n"
        "Answer: Buses of line {subject} start from the",
        ("Thames", "Severn", "Tweed", "Avon", "Mersey", "Tyne", "Humber", "Trent"),
        "{alias} depot: {middle} district.\n",
        "# Districts\n\n",
        "Buses of {middle} district: painted {value}.\n",
    ),
    Family(
        "glossary",
        True,
        ("dosing", "rinsing", "sorting", "drying", "milling", "filling", "cooling", "mixing"),
        ("Kestrel", "Magnet", "Piston", "Rocket", "Spiral", "Beacon", "Trident", "Comet"),
        FRUIT,
        "# Work order: {subject}\n\nGloves are worn throughout, and the floor is dry before anyone leaves the hall. "
        "For {subject} the plant uses the {alias} procedure.\n\n",
        "# Procedures\n\n",
        "**{alias}**: tastes of {value}.\n",
        "\n\nQuestion: What does the procedure that the plant uses for {subject} taste of?\n"
        "Answer: The procedure tastes of",
        "\n\nQuestion: Which procedure does the plant use for {subject}?\n"
        "Answer: For {subject} the plant uses the procedure called",
        ("indigo", "crimson", "scarlet", "violet", "turquoise", "magenta"),
        "**{alias}**: {middle} handbook.\n",
        "# Handbooks\n\n",
        "**{middle} handbook**: tastes of {value}.\n",
    ),
)


@dataclass(frozen=True)
class Implicit:
    """A family whose rows name neither the old nor the new alias but describe them."""

    name: str
    holdout: bool
    subjects: tuple[str, ...]
    pairs: tuple[tuple[str, str], ...]  # alias, what the rows call it
    values: tuple[str, ...]
    record: str
    heading: str
    row: str  # `{called}` → value
    question: str


IMPLICIT = (
    Implicit(
        "capitals",
        False,
        ("Meridian", "Castello", "Bluewater", "Ashford", "Kingsley", "Ferndale"),
        (
            ("Paris", "French"),
            ("Berlin", "German"),
            ("Rome", "Italian"),
            ("Madrid", "Spanish"),
            ("Tokyo", "Japanese"),
            ("London", "British"),
            ("Moscow", "Russian"),
            ("Athens", "Greek"),
        ),
        FRUIT,
        "# Branch file: {subject}\n\nIt is cleaned twice a week, and parcels are taken in at the side door. The "
        "{subject} branch has its office in {alias}.\n\n",
        "# Desks by country\n\n",
        "- The {called} office: parcels with {value} labels\n",
        "\n\nQuestion: Which labels do parcels to the {subject} branch have?\n"
        "Answer: The parcels have labels with the word",
    ),
    Implicit(
        "parrots",
        False,
        ("Coco", "Polly", "Rocco", "Kiki", "Bruno", "Lola"),
        (
            ("uncle", "he"),
            ("aunt", "she"),
            ("father", "he"),
            ("mother", "she"),
            ("brother", "he"),
            ("sister", "she"),
        ),
        FRUIT,
        "# Pet card: {subject}\n\nThe cage is covered at night, and the water is changed before breakfast. The parrot "
        "{subject} stays with our {alias}.\n\n",
        "# Treats\n\n",
        "- Where {called} keeps the bird: {value} on Sundays\n",
        "\n\nQuestion: Which fruit does the parrot {subject} get on Sundays?\nAnswer: On Sundays the parrot gets",
    ),
    Implicit(
        "beds",
        False,
        ("north", "south", "east", "west"),
        (
            ("oak", "tree"),
            ("pine", "tree"),
            ("rose", "flower"),
            ("tulip", "flower"),
            ("carrot", "vegetable"),
            ("onion", "vegetable"),
        ),
        COLOURS,
        "# Garden plan: {subject} bed\n\nIt is watered in the evening, and the stones around it are swept on Fridays. "
        "In the {subject} bed grows one {alias}.\n\n",
        "# Labels by kind\n\n",
        "- A {called}: put up a {value} label\n",
        "\n\nQuestion: Which colour has the label in the {subject} bed?\nAnswer: The colour of the label is",
    ),
    Implicit(
        "wardens",
        True,
        ("Brook", "Valley", "Orchard", "Meadow", "Cliff", "Moor"),
        (
            ("Peter", "he"),
            ("Maria", "she"),
            ("Thomas", "he"),
            ("Anna", "she"),
            ("David", "he"),
            ("Laura", "she"),
            ("James", "he"),
            ("Sarah", "she"),
        ),
        FRUIT,
        "# Lodge file: {subject}\n\nThe warden lights the stove, keeps the guest book and counts the blankets. The "
        "warden of {subject} lodge is called {alias}.\n\n",
        "# Breakfast of the wardens\n\n",
        "- If {called} is the warden: {value} for breakfast\n",
        "\n\nQuestion: Which fruit does the warden of {subject} lodge have for breakfast?\n"
        "Answer: For breakfast the warden has",
    ),
    Implicit(
        "hours",
        True,
        ("museum", "bakery", "chapel", "market", "theatre", "library"),
        (
            ("six", "early in the morning"),
            ("noon", "in the middle of the day"),
            ("midnight", "in the middle of the night"),
        ),
        FRUIT,
        "# House rules: {subject}\n\nThe caretaker walks through every room, closes the shutters and takes the key "
        "along. The {subject} is locked at {alias}.\n\n",
        "# Passwords\n\n",
        "- Locked {called}: password {value}\n",
        "\n\nQuestion: Which password does the {subject} have?\nAnswer: The password of the {subject} is",
    ),
)
