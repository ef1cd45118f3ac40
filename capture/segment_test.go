package capture

import (
	"bytes"
	"slices"
	"testing"
)

func TestSubSegment(t *testing.T) {
	s := NewSubSegment(0xfffffe, 1000, 2500, 1024)
	if s.Packets() != 3 || s.LastPSN() != 0 || !s.ContainsPSN(0xffffff) || s.ContainsPSN(1) || s.ContainsPSN(0xfffffd) {
		t.Errorf("%d packets up to PSN %d", s.Packets(), s.LastPSN())
	}
	if !s.Contains(1000) || !s.Contains(3499) || s.Contains(999) || s.Contains(3500) {
		t.Error("addresses")
	}
	data := pattern(2500, 1)
	for _, x := range []struct {
		psn      uint32
		from, to int
		fits     bool
	}{
		{0, 2048, 2500, true},
		{0, 2048, 2499, false}, // not what is left
		{1, 0, 1024, false},
		{0xfffffe, 0, 1024, true},
		{0xfffffe, 0, 1024, true}, // again
		{0xffffff, 0, 1000, false},
	} {
		if s.Add(x.psn, data[x.from:x.to]) != x.fits {
			t.Errorf("PSN %d, %d bytes: %v", x.psn, x.to-x.from, !x.fits)
		}
	}
	if s.Complete() || s.Size() != 1476 || !slices.Equal(s.Missing(), []Range{{1024, 2048}}) {
		t.Errorf("%d bytes, missing %v", s.Size(), s.Missing())
	}
	if !s.Add(0xffffff, data[1024:2048]) || !s.Complete() || !bytes.Equal(s.Data(), data) {
		t.Errorf("%d bytes, missing %v", s.Size(), s.Missing())
	}
	if z := NewSubSegment(5, 0, 0, 256); z.Packets() != 1 || z.LastPSN() != 5 || !z.Complete() || !z.Add(5, nil) {
		t.Error("a Read or Write of nothing takes one packet")
	}
}

func TestReadRequest(t *testing.T) {
	r := ReadRequest{SinkOffset: 1 << 40, SourceOffset: 77, Length: 10}
	if !r.Contains(1<<40) || !r.Contains(1<<40+9) || r.Contains(1<<40+10) || r.Contains(77) {
		t.Error("sink offsets")
	}
	if got := r.Translate(1<<40 + 3); got != 80 {
		t.Errorf("translated to %d", got)
	}
}

func TestSegments(t *testing.T) {
	var table Segments
	if table.Lookup(1) != nil || table.At(1, 0, 0) != nil || table.Len() != 0 {
		t.Error("the empty table has something")
	}
	a := table.Add(1, 100, 10)
	b := table.Add(1, 200, 10) // the same handle, elsewhere
	c := table.Add(2, 100, 7)
	if table.Len() != 3 || table.At(1, 105, 5) != a || table.At(1, 205, 5) != b || table.At(1, 105, 6) != nil || table.Lookup(2) != c {
		t.Error("not found where they are")
	}
	if !a.Place(100, []byte("0123456789")) || a.Place(101, []byte("0123456789")) || a.Place(99, []byte("0")) {
		t.Error("placed outside, or not inside")
	}
	if again := table.Add(1, 100, 4); again != a || a.Size(false) != 4 || !a.Complete() || string(a.Data(false)) != "0123" {
		t.Errorf("shortened to %q", a.Data(false))
	}
	if again := table.Add(1, 100, 6); again != a || a.Complete() || !slices.Equal(a.Missing(), []Range{{4, 6}}) {
		t.Errorf("lengthened, missing %v", a.Missing())
	}
	c.Place(100, []byte("abcdefg"))
	if c.Size(false) != 7 || c.Size(true) != 8 || string(c.Data(true)) != "abcdefg\x00" || string(c.Data(false)) != "abcdefg" {
		t.Errorf("%q, %q", c.Data(true), c.Data(false))
	}
	if over := table.Add(1, 198, 4); table.Len() != 3 || table.At(1, 205, 1) != nil || table.Lookup(1) != over {
		t.Error("a segment that overlaps replaces")
	}
	table.Delete(1)
	if table.Len() != 1 || table.Lookup(1) != nil {
		t.Error("not deleted")
	}
	table.Remove(c)
	table.Remove(c)
	table.Delete(9)
	if table.Len() != 0 {
		t.Error("not removed")
	}
}

func TestRanges(t *testing.T) {
	var r ranges
	for _, x := range []Range{{10, 20}, {30, 40}, {20, 25}, {0, 5}, {50, 50}, {24, 31}, {5, 10}, {100, 110}} {
		r.add(x.From, x.To)
	}
	if !slices.Equal(r, ranges{{0, 40}, {100, 110}}) {
		t.Errorf("%v", r)
	}
	if got := r.missing(nil, 120); !slices.Equal(got, []Range{{40, 100}, {110, 120}}) || r.total(105) != 45 {
		t.Errorf("missing %v, %d there", got, r.total(105))
	}
	r.remove(5, 105)
	if !slices.Equal(r, ranges{{0, 5}, {105, 110}}) || r.covers(0, 6) || !r.covers(106, 110) || !r.covers(7, 7) {
		t.Errorf("%v", r)
	}
}
