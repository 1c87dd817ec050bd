def html(story):
    return ""


def notebook(story):
    return ""
