"""A page taken apart."""

import json
from html.parser import HTMLParser

HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1> \"'&λ 日本 $x^2$ <b>"


class Tags(HTMLParser):
    """Collects elements, and the text of scripts by their place."""

    def __init__(self):
        super().__init__()
        self.found, self.scripts, self.inside = [], [], False

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self.inside = tag == "script"
        if self.inside:
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, _tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            attrs, text = self.scripts[-1]
            self.scripts[-1] = (attrs, text + data)


def parse(text):
    tags = Tags()
    tags.feed(text)
    return tags


def data_of(text):
    tags = parse(text)
    return json.loads(next(script for attrs, script in tags.scripts if attrs.get("type") == "application/json"))
