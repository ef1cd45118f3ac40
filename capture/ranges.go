package capture

import (
	"fmt"
	"slices"
)

// Range is bytes From up to, but not including, To.
type Range struct {
	From, To uint64
}

// Len returns the number of bytes in r.
func (r Range) Len() uint64 { return r.To - r.From }

// String returns r as it is written in mathematics: [0, 1024).
func (r Range) String() string { return fmt.Sprintf("[%d, %d)", r.From, r.To) }

// ranges are the bytes that there are: sorted, apart from each other, none empty.
type ranges []Range

// add puts [from, to) in. What continues the last range, as most does, costs no
// search.
func (s *ranges) add(from, to uint64) {
	if from >= to {
		return
	}
	n := len(*s)
	if n == 0 || from > (*s)[n-1].To {
		*s = append(*s, Range{from, to})
		return
	}
	if last := &(*s)[n-1]; from >= last.From {
		last.To = max(last.To, to)
		return
	}
	i, _ := slices.BinarySearchFunc(*s, from, func(r Range, from uint64) int {
		if r.To < from {
			return -1
		}
		return 1
	})
	j := i
	for ; j < n && (*s)[j].From <= to; j++ {
		from, to = min(from, (*s)[j].From), max(to, (*s)[j].To)
	}
	*s = slices.Replace(*s, i, j, Range{from, to})
}

// remove takes [from, to) out.
func (s *ranges) remove(from, to uint64) {
	if from >= to || len(*s) == 0 || from >= (*s)[len(*s)-1].To {
		return
	}
	var kept ranges
	for _, r := range *s {
		if r.From < from {
			kept = append(kept, Range{r.From, min(r.To, from)})
		}
		if r.To > to {
			kept = append(kept, Range{max(r.From, to), r.To})
		}
	}
	*s = kept
}

// advance counts from n on.
func (s *ranges) advance(n uint64) {
	s.remove(0, n)
	for i := range *s {
		(*s)[i].From -= n
		(*s)[i].To -= n
	}
}

// covers tells whether all of [from, to) is there.
func (s ranges) covers(from, to uint64) bool {
	if from >= to {
		return true
	}
	for _, r := range s {
		if r.From <= from && from < r.To {
			return to <= r.To
		}
	}
	return false
}

// total returns how many bytes of [0, limit) there are.
func (s ranges) total(limit uint64) (n uint64) {
	for _, r := range s {
		if r.From < limit {
			n += min(r.To, limit) - r.From
		}
	}
	return n
}

// present calls f with the parts of [0, size) that are not in missing, in order.
func present(missing []Range, size uint64, f func(from, to uint64)) {
	at := uint64(0)
	for _, gap := range missing {
		if at < gap.From {
			f(at, gap.From)
		}
		at = gap.To
	}
	if at < size {
		f(at, size)
	}
}

// missing appends to gaps what of [0, size) is not there.
func (s ranges) missing(gaps []Range, size uint64) []Range {
	at := uint64(0)
	for _, r := range s {
		if r.From >= size {
			break
		}
		if r.From > at {
			gaps = append(gaps, Range{at, r.From})
		}
		at = r.To
	}
	if at < size {
		gaps = append(gaps, Range{at, size})
	}
	return gaps
}
