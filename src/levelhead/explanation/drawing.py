def standalone(story):
    return ""
