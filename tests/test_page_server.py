"""The page's server: what each route answers, to good questions and to bad ones."""

from __future__ import annotations

from page_server import Running, served_page, stubbed_page  # noqa: F401


def test_the_link_leads_to_the_page_and_leaves_the_address_clean(page: Running) -> None:
    reply = page.get(f"/?token={page.token}", Cookie=None)
    assert (reply.status, reply.headers["location"]) == (303, "/")
    assert reply.headers["set-cookie"] == f"{page.cookie}; Path=/; HttpOnly; SameSite=Strict"
    front = page.get("/")
    assert front.status == 200
    assert front.headers["content-type"] == "text/html; charset=utf-8"
    assert "<title>√d</title>" in front.body.decode()
