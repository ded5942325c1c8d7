"""The table of a long run of the fuzz tests."""

from collections import Counter

HEAD = """| function or command | cases | right results | documented errors | seconds |
| --- | --- | --- | --- | --- |"""
ENDINGS = ("right result", "documented error", "defect")


def total(rows):
    """Returns the row of all kinds together."""
    counts = Counter()
    for row in rows:
        counts.update({name: row.get(name, 0) for name in (*ENDINGS, "seconds")})
    return {"kind": "in all", **counts}


def line(row):
    """Returns a row as Markdown."""
    right, error, defect = (row.get(ending, 0) for ending in ENDINGS)
    note = f" {defect} DEFECTS" if defect else ""
    cells = (row["kind"], f"{right + error + defect:,}", f"{right:,}", f"{error:,}")
    return f"| {' | '.join(cells)} | {row['seconds']:.0f} |{note}"


def table(rows):
    """Returns the whole table as Markdown."""
    return "\n".join([HEAD, *map(line, rows), line(total(rows))])
