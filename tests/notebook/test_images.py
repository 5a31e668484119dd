"""Images of Pillow and what draws on them: one image, whichever side draws."""

from __future__ import annotations

from pathlib import Path

import pytest

from sublet.errors import Unpicklable
from tests.notebook.sides import Notebook

MAKE = "from PIL import Image, ImageDraw\nimg = Image.new('RGB', (8, 8)); d = ImageDraw.Draw(img)"
RED, BLUE = (200, 0, 0), (0, 0, 200)


def pixel(nb: Notebook, at: tuple[int, int]) -> tuple[int, ...]:
    """As the notebook sees it."""
    found: tuple[int, ...] = nb.names["img"].getpixel(at)
    return found


def test_what_draws_goes_on_after_the_image_has_crossed_alone(nb: Notebook) -> None:
    """Neither cell on the device reads what draws on it."""
    nb.here(MAKE)
    assert nb.there(f"img.putpixel((0, 0), {RED})") is None
    assert nb.here(f"d.point((1, 1), fill={BLUE})") is None
    assert (pixel(nb, (0, 0)), pixel(nb, (1, 1))) == (RED, BLUE)
    assert nb.there("seen = img.getpixel((0, 0)), img.getpixel((1, 1))") is None
    assert nb.names["seen"] == (RED, BLUE)


@pytest.mark.parametrize("made_there", [True, False])
def test_it_draws_on_one_image_from_both_sides_in_turn(nb: Notebook, made_there: bool) -> None:
    (nb.there if made_there else nb.here)(MAKE)
    assert nb.there(f"d.point((0, 0), fill={RED})") is None
    assert nb.here(f"d.point((1, 1), fill={BLUE})") is None
    assert nb.there(f"d.point((2, 2), fill={RED}); seen = img.getpixel((1, 1))") is None
    assert nb.here(f"d.point((3, 3), fill={BLUE})") is None
    assert [pixel(nb, (n, n)) for n in range(4)] == [RED, BLUE, RED, BLUE]
    assert nb.names["seen"] == BLUE
    assert nb.names["d"]._image is nb.names["img"]


def test_a_drawing_that_is_made_there_on_an_image_of_the_notebook_draws_on_that(nb: Notebook) -> None:
    nb.here(MAKE)
    mine = nb.names["img"]
    assert nb.there(f"other = ImageDraw.Draw(img); other.point((0, 0), fill={RED})") is None
    assert nb.here(f"other.point((1, 1), fill={BLUE})") is None
    assert nb.names["img"] is mine
    assert (pixel(nb, (0, 0)), pixel(nb, (1, 1))) == (RED, BLUE)


def test_an_image_that_gets_another_size_is_another_canvas(nb: Notebook) -> None:
    """What drew on the old one is put onto the new one, as it is where the cell ran."""
    nb.here(MAKE)
    assert nb.there(f"img = img.resize((4, 4)); d = ImageDraw.Draw(img); d.point((3, 3), fill={RED})") is None
    assert nb.names["img"].size == (4, 4)
    assert nb.here(f"d.point((2, 2), fill={BLUE})") is None
    assert (pixel(nb, (3, 3)), pixel(nb, (2, 2))) == (RED, BLUE)


@pytest.mark.parametrize("mode", ["1", "L", "P", "I", "F", "RGBA", "CMYK"])
def test_images_of_every_mode_are_changed_there(nb: Notebook, mode: str) -> None:
    nb.here(f"from PIL import Image\nimg = Image.new({mode!r}, (4, 4)); other = [img]")
    assert nb.there("img.paste(1, (0, 0, 2, 2))") is None
    assert nb.here("want = Image.new(img.mode, (4, 4)); want.paste(1, (0, 0, 2, 2))") is None
    assert nb.names["other"][0] is nb.names["img"]
    assert nb.names["img"].tobytes() == nb.names["want"].tobytes()


def test_what_draws_on_memory_that_its_image_no_longer_has_is_refused_by_name(nb: Notebook) -> None:
    """In one process it draws into nowhere, too."""
    nb.here(MAKE + "\nimg.im = Image.new('RGB', (8, 8)).im")
    with pytest.raises(Exception, match=r"d\.im: a ImagingCore"):
        nb.there("d.point((0, 0))")


OPENED = """
import io
from PIL import Image, PngImagePlugin
info = PngImagePlugin.PngInfo(); info.add_text("who", "me")
png, jpeg = io.BytesIO(), io.BytesIO()
Image.new("RGB", (8, 8)).save(png, "png", pnginfo=info); Image.new("RGB", (8, 8)).save(jpeg, "jpeg", quality=40)
opened, photo = Image.open(png), Image.open(jpeg); opened.load()
"""
TOLD = "told = opened.text, opened.get_format_mimetype(), opened.n_frames, opened.seek(0), photo.quantization"


@pytest.mark.parametrize("made_there", [True, False])
def test_an_image_of_a_file_goes_on_to_tell_what_stands_in_the_file(nb: Notebook, made_there: bool) -> None:
    """Pillow's own pickling leaves that out, and then even its own methods fail."""
    (nb.there if made_there else nb.here)(OPENED)
    for run in (nb.there, nb.here):
        assert run(TOLD) is None
        assert nb.names["told"][:4] == ({"who": "me"}, "image/png", 1, None)
        assert len(nb.names["told"][4]) == 2
        assert run(f"opened.putpixel((0, 0), {RED})") is None
    assert nb.here("photo.save(io.BytesIO(), 'jpeg', quality='keep')") is None


FRAMES = """
from PIL import Image, ImageSequence
shades = [Image.new("RGB", (8, 8), (n * 60, 0, 0)) for n in range(4)]
shades[0].save(file, save_all=True, append_images=shades[1:])
film = Image.open(file); opened, same = film.fp, [film]; film.seek(1)
def shade(): return film.convert("RGB").getpixel((5, 5))[0], film.tell()
"""


@pytest.mark.parametrize("kind", ["gif", "tiff", "png"])
@pytest.mark.parametrize("made_there", [True, False])
def test_an_image_of_several_frames_is_at_the_frame_where_the_other_side_left_it(
    nb: Notebook, made_there: bool, kind: str, tmp_path: Path
) -> None:
    nb.here(f"file = {str(tmp_path / f'film.{kind}')!r}")
    assert (nb.there if made_there else nb.here)(FRAMES) is None
    assert nb.there("seen = shade(), film.n_frames, film.is_animated; film.seek(2)") is None
    assert nb.names["seen"] == ((60, 1), 4, True)
    assert nb.here("seen = shade(), same[0] is film; film.seek(3)") is None
    assert nb.names["seen"] == ((120, 2), True)
    assert (
        nb.there("seen = shade(), [one.convert('RGB').getpixel((0, 0))[0] for one in ImageSequence.Iterator(film)]")
        is None
    )
    assert nb.names["seen"] == ((180, 3), [0, 60, 120, 180])
    assert nb.there("film.seek(1); film.paste(1, (0, 0, 2, 2))") is None
    assert nb.here("drawn = film.tobytes()") is None
    assert nb.there("seen = film.tobytes() == drawn, shade()") is None
    assert nb.names["seen"] == (True, (60, 1))
    assert nb.here("film.close()" if made_there else "opened.close()") is None


@pytest.mark.parametrize("kind", ["gif", "tiff", "png"])
@pytest.mark.parametrize("made_there", [True, False])
def test_what_is_drawn_on_a_frame_before_its_image_crosses_is_there(
    nb: Notebook, made_there: bool, kind: str, tmp_path: Path
) -> None:
    """Pillow reads the present frame again to count the frames."""
    nb.here(f"file = {str(tmp_path / f'film.{kind}')!r}")
    draw = "film.paste((9, 9, 9), (0, 0, 2, 2)); drawn = film.tobytes()"
    assert (nb.there if made_there else nb.here)(f"{FRAMES}\n{draw}") is None
    assert (nb.here if made_there else nb.there)("seen = film.tobytes() == drawn") is None
    assert nb.names["seen"] is True
    assert nb.there(draw.replace("9", "7")) is None
    assert nb.here("seen = film.tobytes() == drawn") is None
    assert nb.names["seen"] is True
    assert nb.there("seen = film.tobytes() == drawn") is None
    assert nb.names["seen"] is True
    assert nb.here("film.close()" if made_there else "opened.close()") is None


def test_frames_that_are_in_no_file_are_refused_by_name(nb: Notebook) -> None:
    """Pillow's own pickling leaves all but one of them out, and says nothing."""
    nb.here("import io\nfile = io.BytesIO()")
    assert nb.here(FRAMES.replace("(file, ", "(file, 'gif', ")) is None
    with pytest.raises(Unpicklable, match="film: an image of 4 frames that is in no file"):
        nb.there("film.seek(2)")
