"""Slow packers in plain Python, written from the algorithms' rules. They import nothing of the package."""


def first_fit(lengths, order, capacity):
    bins = []
    for i in order:
        for members in bins:
            if sum(lengths[j] for j in members) + lengths[i] <= capacity:
                members.append(i)
                break
        else:
            bins.append([i])
    return bins


def first_fit_decreasing(lengths, capacity):
    return first_fit(lengths, [i for _, i in sorted(((n, i) for i, n in enumerate(lengths)), reverse=True)], capacity)


def concatenative(lengths, capacity):
    bins, load = [], 0
    for i, n in enumerate(lengths):
        if not bins or load + n > capacity:
            bins.append([])
            load = 0
        bins[-1].append(i)
        load += n
    return bins


def modified_first_fit_decreasing(lengths, capacity):
    items = list(enumerate(lengths))
    large = sorted([x for x in items if 2 * x[1] > capacity], key=lambda x: -x[1])
    medium = sorted([x for x in items if 2 * x[1] <= capacity < 3 * x[1]], key=lambda x: -x[1])
    small = sorted([x for x in items if 3 * x[1] <= capacity < 6 * x[1]], key=lambda x: x[1])
    tiny = sorted([x for x in items if 6 * x[1] <= capacity], key=lambda x: x[1])
    bins = [[x] for x in large]

    def room(members):
        return capacity - sum(n for _, n in members)

    with_medium = set()
    for b, members in enumerate(bins):
        fitting = [x for x in medium if x[1] <= room(members)]
        if fitting:
            members.append(fitting[0])
            medium.remove(fitting[0])
            with_medium.add(b)
    for b in reversed(range(len(bins))):
        if b in with_medium or len(small) < 2 or small[0][1] + small[1][1] > room(bins[b]):
            continue
        first = small.pop(0)
        second = [x for x in small if x[1] + first[1] <= room(bins[b])][-1]
        small.remove(second)
        bins[b] += [first, second]
    rest = sorted(medium + small + tiny, key=lambda x: -x[1])
    for members in bins:
        while rest and rest[-1][1] <= room(members):
            chosen = next(x for x in rest if x[1] <= room(members))
            rest.remove(chosen)
            members.append(chosen)
    last = []  # sorted by ascending load; a changed bin goes behind bins of equal load
    for x in rest:
        members = last.pop(0) if last and x[1] <= room(last[0]) else []
        members.append(x)
        at = sum(room(other) >= room(members) for other in last)
        last.insert(at, members)
    return [[i for i, _ in members] for members in bins + last]
