"""What `import_samples` refuses, and how it says so."""

import re
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from schemas.errors import InputError
from tests.stages.pictures import noise, save, taken


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def encoded(image: Image.Image, **how: Any) -> bytes:
    stream = BytesIO()
    image.save(stream, **how)
    return stream.getvalue()


Files = dict[str, str | bytes | int]  # a number is a picture of noise


def write(folder: Path, files: Files) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, int):
            save(path, content)
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())


LINE = '{"file_name": "a.png", "prompt": "x"}\n'
BAD: list[tuple[Files, str]] = [
    ({"notes.md": "x"}, "`path` '{}' holds no pictures (.bmp, .gif, .jpeg, .jpg, .png, .tif, .tiff, .webp); put"),
    (
        {"a.png": 1},
        "picture '{}/a.png' has no prompt; write it into '{}/a.txt', or into metadata.jsonl, or put the pictures of",
    ),
    (
        {"a.png": 1, "b.png": 1, "a.txt": "x"},
        "picture '{}/b.png' has no prompt, others have one beside them; write it into '{}/b.txt'",
    ),
    ({"a.png": 1, "a.txt": " \n"}, "'{}/a.txt': the prompt is empty; write one, or leave the picture out"),
    ({"a.png": 1, "a.txt": "café".encode("latin-1")}, "'{}/a.txt' is not UTF-8 at byte 3; save it as UTF-8"),
    ({"____/a.png": 1}, "'{}/____': the prompt is empty"),
    (
        {"a/b/c.png": 1},
        "picture '{}/a/b/c.png' lies more than one sub-folder deep, so no folder is its prompt; name '{}/a' as `path`",
    ),
    ({"a/metadata.csv": "x", "a/a.png": 1}, "'{}/a/metadata.csv' lies in a sub-folder; name that sub-folder"),
    ({"metadata.csv": "x", "metadata.jsonl": "x", "a.png": 1}, "holds both metadata.jsonl and metadata.csv; take one"),
    (
        {"metadata.jsonl": '{"filename": "a.png"}', "a.png": 1},
        "'{}/metadata.jsonl', line 1: no column 'file_name', the picture's name. Known: filename. Did you mean",
    ),
    (
        {"metadata.jsonl": LINE + '{"file_name": "a.png", "promt": "x"}', "a.png": 1},
        "'{}/metadata.jsonl', line 2: no column 'prompt'; set `prompt_column`. Known: promt. Did you mean 'promt'?",
    ),
    (
        {"metadata.jsonl": '{"file_name": "b.png", "prompt": "x"}', "a.png": 1},
        "'{}/metadata.jsonl', line 1: no picture 'b.png'; mend `file_name` (pictures lie in this folder or its",
    ),
    ({"metadata.jsonl": '{"file_name": "../in/a.png"}', "a.png": 1}, "line 1: no picture '../in/a.png'; mend"),
    ({"metadata.jsonl": '{"file_name": "a.png", "prompt": ""}', "a.png": 1}, "line 1: the prompt is empty"),
    ({"metadata.jsonl": '{"file_name": "a.png", "prompt": 3}', "a.png": 1}, "`prompt_column` 'prompt' wants text"),
    ({"metadata.jsonl": "{", "a.png": 1}, "'{}/metadata.jsonl', line 1: no JSON"),
    ({"metadata.jsonl": "\n", "a.png": 1}, "'{}/metadata.jsonl' lists no pictures; write one row a picture"),
    (
        {"metadata.csv": "file_name,prompt\na.png,a cat, asleep\n", "a.png": 1},
        "'{}/metadata.csv', line 2: wants 2 fields, as the first line has; put quotes round a comma",
    ),
    ({"metadata.csv": "file_name,prompt\na.png\n", "a.png": 1}, "'{}/metadata.csv', line 2: wants 2 fields"),
    ({"metadata.csv": 'file_name,prompt\na.png,"x"y\n', "a.png": 1}, "'{}/metadata.csv', line 2: no CSV ("),
]


@pytest.mark.parametrize(("files", "words"), BAD, ids=[words[:60] for _, words in BAD])
def test_bad_folders(folder: Path, out: Path, files: Files, words: str) -> None:
    write(folder, files)
    with pytest.raises(InputError, match=re.escape(words.replace("{}", str(folder)))):
        taken(folder, out)
    assert not (out / "samples").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "does not decode (UnidentifiedImageError"),
        (encoded(Image.fromarray(noise(0, 64, 64)), format="PNG")[:5000], "does not decode (OSError: image file is"),
        (encoded(Image.fromarray(noise(0, 64, 64)), format="JPEG")[:3000], "does not decode (OSError: image file is"),
        (
            encoded(Image.new("I;16", (2, 2)), format="PNG"),
            "has more than 8 bits a channel (mode I;16); save it with 8",
        ),
        (encoded(Image.new("F", (2, 2)), format="TIFF"), "has more than 8 bits a channel (mode F); save it with 8"),
    ],
)
def test_a_damaged_picture_is_named_with_its_sample(folder: Path, out: Path, content: bytes, words: str) -> None:
    for number in range(3):
        save(folder / "a_cat" / f"{number}.png", number)
    (folder / "a_cat" / "1.png").write_bytes(content)
    with pytest.raises(InputError, match=re.escape(words)) as error:
        taken(folder, out)
    assert re.match(rf"picture '{folder}/a_cat/1\.png' \(sample '[0-9a-f]{{16}}/1'\) ", str(error.value))


def test_paths_that_are_no_folder(tmp_path: Path, out: Path) -> None:
    save(tmp_path / "x.png")
    for path, settings, words in (
        (tmp_path / "x.png", {}, "is a file; name the folder that holds the pictures"),
        (tmp_path / "nowhere", {}, "is no folder or hub id; name the folder"),
        (tmp_path, {"revision": "main"}, "`revision` is 'main', but `path` .* is a folder; leave it out"),
    ):
        with pytest.raises(InputError, match=words):
            taken(path, out, **settings)
