"""The manifest's tables."""

from __future__ import annotations

from dataclasses import fields

from sqlalchemy import BigInteger, Column, Float, Integer, MetaData, String, Table, Text

from kvfix.store.records import VersionRecord

FORMAT_VERSION = 1

TYPES = {"int": BigInteger, "str": Text, "str | None": Text, "float | None": Float}
KEY = ("corpus", "doc_id", "version")
SETTINGS = ("format", "keep")  # in the table meta

metadata = MetaData()

meta = Table("meta", metadata, Column("key", String, primary_key=True), Column("value", String, nullable=False))

versions = Table(
    "versions",
    metadata,
    *(
        Column(field.name, TYPES[str(field.type)], primary_key=field.name in KEY, nullable="None" in str(field.type))
        for field in fields(VersionRecord)
    ),
)

# the head of each document that has not been removed
documents = Table(
    "documents",
    metadata,
    Column("corpus", Text, primary_key=True),
    Column("doc_id", Text, primary_key=True),
    Column("version", BigInteger, nullable=False),
)

# which version needs which file, in order
segments = Table(
    "segments",
    metadata,
    Column("corpus", Text, primary_key=True),
    Column("doc_id", Text, primary_key=True),
    Column("version", BigInteger, primary_key=True),
    Column("ordinal", Integer, primary_key=True),
    Column("name", String(64), nullable=False, index=True),
)

models = Table("models", metadata, Column("fingerprint", String(16), primary_key=True))

gates = Table(
    "gates",
    metadata,
    Column("fingerprint", String(16), primary_key=True),
    Column("backend", String, primary_key=True),
)
