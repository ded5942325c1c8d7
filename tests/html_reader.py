"""Reads the elements and the text of an HTML page, and the arrays of a page of attention."""

import base64
import html.parser
import zlib

import numpy as np


def decoded_numbers(array):
    """An array in the data of a page of attention, which its README describes."""
    kind = {"float32": "<f4", "float16": "<f2"}[array["dtype"]]
    data = base64.b64decode(array["data"])
    data = zlib.decompress(data) if "compression" in array else data
    numbers = np.frombuffer(data, kind).astype(np.float32)
    return (numbers * np.float32(array.get("scale", 1))).reshape(array["shape"])


class Reader(html.parser.HTMLParser):
    """Holds every element with its attributes, the open tags, and the text."""

    VOID = ("meta", "img")

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def attributes(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]
