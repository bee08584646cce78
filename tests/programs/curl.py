"""In place of ``curl``, on machines without it: what the documents use of it. It starts as quickly as it can."""

import sys
from http.client import HTTPConnection

headers: dict[str, str] = {}
body, url, words = None, "", iter(sys.argv[1:])
for word in words:
    match word:
        case "-H":
            name, _, value = next(words).partition(": ")
            headers[name] = value
        case "-d":
            body = next(words)
        case "-sS":
            pass
        case _:
            url = word
place, _, path = url.partition("/")
connection = HTTPConnection(place)
connection.request("GET" if body is None else "POST", f"/{path}", body, headers)
print(connection.getresponse().read().decode(), end="")
connection.close()
