"""Local servers that answer as S3 and as Google Cloud Storage do."""

import contextlib
import http.server
import logging
import os
import socket
import threading
from collections.abc import Iterator

import fsspec
import pytest

BUCKET = "bucket"


@contextlib.contextmanager
def opened(kind: str) -> Iterator[str]:
    """A server with one empty bucket, which this process and its children use.

    Args:
      kind: "s3" or "gs".

    Yields:
      The address of the bucket.
    """
    with contextlib.ExitStack() as held:
        patch = held.enter_context(pytest.MonkeyPatch.context())
        # gcsfs would ask Google what kind of bucket it is.
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        settings = held.enter_context({"s3": _s3, "gs": _gs}[kind]())
        for name, value in settings.items():
            patch.setenv(name, value)
        fsspec.get_filesystem_class(kind).clear_instance_cache()
        with contextlib.suppress(FileExistsError):  # of an earlier server
            fsspec.filesystem(kind).mkdir(BUCKET)
        yield f"{kind}://{BUCKET}"
        fsspec.get_filesystem_class(kind).clear_instance_cache()


@contextlib.contextmanager
def _s3() -> Iterator[dict[str, str]]:
    server = pytest.importorskip("moto.server", reason="moto[s3] is not installed")
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    port = running.get_host_and_port()[1]
    try:
        yield {
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        }
    finally:
        running.stop()


@contextlib.contextmanager
def _gs() -> Iterator[dict[str, str]]:
    pytest.importorskip("gcsfs", reason="gcsfs is not installed")
    # Another emulator, e.g. fake-gcs-server or Google's storage-testbench.
    if running := os.environ.get("MUPAX_TEST_GCS"):
        yield {"STORAGE_EMULATOR_HOST": running}
        return
    emulator = pytest.importorskip(
        "gcp_storage_emulator.server", reason="gcp-storage-emulator is not installed"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        _add_precondition(patch)
        _keep_last_byte(patch)
        # A client that has read enough closes the connection.
        patch.setattr(http.server.HTTPServer, "handle_error", lambda *_: None)
        server = emulator.create_server("127.0.0.1", port, in_memory=True)
        server.start()
        try:
            yield {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}"}
        finally:
            server.stop()


_DENIED = {
    "s3": b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>",
    "gs": b'{"error": {"code": 403, "message": "me may not do this"}}',
}
_EMPTY = {
    "s3": b"<ListBucketResult><KeyCount>0</KeyCount></ListBucketResult>",
    "gs": b"{}",
}
_STRANGER = b'{"error": {"code": 401, "message": "Anonymous caller has no access"}}'


@contextlib.contextmanager
def refusing(kind: str, refused: str) -> Iterator[str]:
    """A server with an empty bucket that answers what one without permission is told.

    Args:
      kind: "s3" or "gs".
      refused: "everything", "writes", "deletes", or "strangers" (without credentials).

    Yields:
      The address of the bucket.
    """
    package = {"s3": "s3fs", "gs": "gcsfs"}[kind]
    pytest.importorskip(package, reason=f"{package} is not installed")
    methods = {
        "everything": ("GET", "POST", "PUT", "DELETE"),
        "writes": ("POST", "PUT", "DELETE"),
        "deletes": ("DELETE",),
        "strangers": (),
    }[refused]

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            status, body = 200, _EMPTY[kind]
            if self.command in methods:
                status, body = 403, _DENIED[kind]
            elif refused == "strangers":  # S3's client does not ask without a key
                status, body = 401, _STRANGER
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_PUT = do_DELETE = do_GET

        def do_HEAD(self) -> None:  # no such object
            self.send_response(404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    keys = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    settings = {
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        "STORAGE_EMULATOR_HOST": address,
        "AWS_ENDPOINT_URL": address,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in settings.items():
                patch.setenv(name, value)
            for name in keys:
                if refused == "strangers":
                    patch.delenv(name, raising=False)
                else:
                    patch.setenv(name, "testing")
            fsspec.get_filesystem_class(kind).clear_instance_cache()
            yield f"{kind}://bucket"
            fsspec.get_filesystem_class(kind).clear_instance_cache()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _add_precondition(patch: pytest.MonkeyPatch) -> None:
    """Give the emulator what it lacks: an upload only where there is no object.

    It answers one request at a time, so that no other comes in between.
    """
    from gcp_storage_emulator.exceptions import NotFound
    from gcp_storage_emulator.handlers import objects

    upload = objects._multipart_upload

    def checked(request, response, storage):
        if request.query.get("ifGenerationMatch") == ["0"]:
            name = request.data["meta"]["name"]
            with contextlib.suppress(NotFound):
                storage.get_file_obj(request.params["bucket_name"], name)
                response.status = http.HTTPStatus.PRECONDITION_FAILED
                response.json({"error": {"code": 412, "message": "conditionNotMet"}})
                return
        upload(request, response, storage)

    patch.setattr(objects, "_multipart_upload", checked)


def _keep_last_byte(patch: pytest.MonkeyPatch) -> None:
    """End the content of an upload with CR LF, as the standard of MIME asks.

    gcsfs ends it with LF alone. The emulator then takes a last byte of the content that
    is CR for a part of the line's end, and drops it.
    """
    from gcp_storage_emulator import server

    read = server._read_raw_data

    def ended(request_handler):
        data = read(request_handler)
        end = b"\n--==0==--"
        if data and data.endswith(end):
            data = data.removesuffix(end) + b"\r" + end
        return data

    patch.setattr(server, "_read_raw_data", ended)
