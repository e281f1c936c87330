# SPDX-License-Identifier: Apache-2.0
"""`Form`: a multipart body with one file, read as it comes; all but the file's content is small."""

from http import HTTPStatus

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.datastructures import Headers

from metrale_jax.core.errors import shown
from serving.core.errors import Kind, ServiceError
from serving.http.errors import HttpFault

MAX_FIELDS, MAX_FIELD_BYTES, MAX_NAME_LEN, MAX_BOUNDARY_LEN = 16, 4096, 255, 200
# What a body may have beside its file's content.
MAX_FRAME_BYTES = 256 << 10


class Form:
    """`fields` are its texts, `file_name` what its file is called ("" until it has come), `data` what has come of the
    file and was not taken yet. Raises `ServiceError` for what is no such form."""

    def __init__(self, headers: Headers):
        self._parser = MultipartParser(
            _boundary(headers),
            {
                "on_part_begin": self._begin,
                "on_header_field": self._on_name,
                "on_header_value": self._on_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._on_data,
                "on_part_end": self._end,
                "on_end": self._end_all,
            },
        )
        self.fields: dict[str, str] = {}
        self.file_name, self.data, self.num_file_bytes = "", bytearray(), 0
        self._is_whole = False
        self._begin()

    def feed(self, chunk: bytes) -> None:
        """Takes the next bytes of the body."""
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise _broken(shown(str(error), 120)) from error

    def taken(self) -> bytes:
        """What has come of the file, which is forgotten here."""
        data, self.data = bytes(self.data), bytearray()
        return data

    def check_whole(self) -> None:
        """Nothing. Raises `ServiceError` for a form that is not whole, or that has no file."""
        if not self._is_whole:
            raise _broken("its last boundary is missing")
        if not self.file_name:
            raise ServiceError(
                Kind.INVALID, "file is not there, or has no name; send one, with a filename.", field="file"
            )

    def _begin(self) -> None:
        self._header_name, self._header_value, self._disposition = b"", b"", b""
        self._name, self._is_file, self._text = "", False, bytearray()

    def _on_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header_name, self._header_value = b"", b""

    def _end_headers(self) -> None:
        kind, options = parse_options_header(self._disposition)
        if kind != b"form-data" or b"name" not in options:
            raise _broken("a part has no name")
        self._name, self._is_file = _text(options[b"name"]), b"filename" in options
        if self._is_file and (self._name != "file" or self.file_name):
            raise ServiceError(
                Kind.INVALID, f"part {shown(self._name, 80)} is a second file; send one, as file.", field="file"
            )
        if self._is_file:
            self.file_name = _file_name(options[b"filename"])
        elif self._name in self.fields or len(self.fields) >= MAX_FIELDS:
            message = f"field {shown(self._name, 80)} comes twice, or after {MAX_FIELDS} others; send each once."
            raise ServiceError(Kind.INVALID, message, field=self._name[:80])

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self.data += data[start:end]
            self.num_file_bytes += end - start
        elif len(self._text) + end - start > MAX_FIELD_BYTES:
            message = f"field {shown(self._name, 80)} has more than {MAX_FIELD_BYTES} bytes; send less."
            raise ServiceError(Kind.INVALID, message, field=self._name[:80])
        else:
            self._text += data[start:end]

    def _end(self) -> None:
        if not self._is_file:
            self.fields[self._name] = _text(bytes(self._text))
        self._begin()

    def _end_all(self) -> None:
        self._is_whole = True


def _boundary(headers: Headers) -> bytes:
    kind, options = parse_options_header(headers.get("content-type", ""))
    if kind != b"multipart/form-data" or headers.get("content-encoding", "identity").strip().lower() != "identity":
        message = f"content-type={shown(kind.decode('latin-1'), 80)} is not served; send multipart/form-data as it is."
        raise HttpFault(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message, "content-type")
    boundary = options.get(b"boundary", b"")
    if not 1 <= len(boundary) <= MAX_BOUNDARY_LEN:
        raise _broken("content-type names no boundary that could be one")
    return boundary


def _file_name(given: bytes) -> str:
    """What the file is called: its last part, without what could do harm where it is shown. It never is a path here."""
    name = _text(given).replace("\\", "/").rsplit("/", 1)[-1]
    return "".join(letter for letter in name if letter.isprintable())[:MAX_NAME_LEN].strip()


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _broken(fault: str) -> ServiceError:
    return ServiceError(Kind.INVALID, f"The body is no multipart form ({fault}); send one.")
