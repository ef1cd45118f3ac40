package capture

import "slices"

// This file puts memory together from the packets of a capture. A message of an upper layer
// has chunks, and a chunk has segments. Each segment has a handle, the RKey or STag. RDMA
// Writes and Reads each move a part of a segment.
//
// On InfiniBand such an operation is a sub-segment. It begins with the packet that has the
// RETH, and its fragments are placed by their PSN. On iWARP each fragment has an offset.
// The offset of a Read Response is in the reader's memory, and is translated.

// SubSegment is one RDMA Write or RDMA Read on InfiniBand: a range of PSNs that stands for
// a range of memory. Its fragments may come in any order, and twice.
type SubSegment struct {
	FirstPSN uint32 // FirstPSN is the PSN of the Write's first packet, or of the Read Request.
	Offset   uint64 // address of the first byte
	Length   uint32 // Length is how many bytes the whole operation has.
	MTU      int    // MTU is how many bytes every fragment has, except the last one.

	buf buffer
}

// NewSubSegment returns a sub-segment without any data. It panics if mtu is not
// positive.
func NewSubSegment(firstPSN uint32, offset uint64, length uint32, mtu int) *SubSegment {
	if mtu <= 0 {
		panic("capture: MTU not positive")
	}
	s := &SubSegment{FirstPSN: firstPSN & psnMask, Offset: offset, Length: length, MTU: mtu}
	s.buf.keep = uint64(length)
	return s
}

// Packets returns how many PSNs the sub-segment takes, at least one.
func (s *SubSegment) Packets() int { return packets(s.Length, s.MTU) }

func packets(length uint32, mtu int) int {
	return max(1, int((uint64(length)+uint64(mtu)-1)/uint64(mtu)))
}

// LastPSN returns the PSN of the last fragment.
func (s *SubSegment) LastPSN() uint32 {
	return (s.FirstPSN + uint32(s.Packets()) - 1) & psnMask
}

// ContainsPSN tells whether the fragment with that PSN belongs here.
func (s *SubSegment) ContainsPSN(psn uint32) bool {
	n := (psn - s.FirstPSN) & psnMask
	return int(n) < s.Packets()
}

// Contains tells whether the address lies in this part of memory.
func (s *SubSegment) Contains(offset uint64) bool {
	return offset-s.Offset < uint64(s.Length)
}

// Add places the fragment with that PSN. It returns false, and takes nothing,
// if there is no place for it or it does not have the length that its place
// asks for.
func (s *SubSegment) Add(psn uint32, data []byte) bool {
	if !s.ContainsPSN(psn) {
		return false
	}
	off := uint64((psn-s.FirstPSN)&psnMask) * uint64(s.MTU)
	if uint64(len(data)) != min(uint64(s.MTU), uint64(s.Length)-off) {
		return false
	}
	s.buf.put(off, data)
	return true
}

// Size returns how many bytes there are.
func (s *SubSegment) Size() int { return int(s.buf.have.total(uint64(s.Length))) }

// Complete tells whether all bytes are there.
func (s *SubSegment) Complete() bool { return s.buf.have.covers(0, uint64(s.Length)) }

// Missing returns what is not there, counted from Offset.
func (s *SubSegment) Missing() []Range { return s.buf.have.missing(nil, uint64(s.Length)) }

// Data returns the bytes, zero where they are missing. It is valid until the
// next Add.
func (s *SubSegment) Data() []byte { return s.buf.view(0, uint64(s.Length)) }

// ReadRequest is an RDMA Read on iWARP, whose data carries the addresses of the
// reader's memory, the sink.
type ReadRequest struct {
	SinkSTag, SourceSTag     uint32
	SinkOffset, SourceOffset uint64
	Length                   uint32
}

// Contains tells whether a sink offset belongs to this request.
func (r *ReadRequest) Contains(offset uint64) bool {
	return offset-r.SinkOffset < uint64(r.Length)
}

// Translate returns the source offset of what arrives at a sink offset.
func (r *ReadRequest) Translate(offset uint64) uint64 {
	return offset - r.SinkOffset + r.SourceOffset
}

// Segment is a piece of memory that one side has told the other the handle of.
type Segment struct {
	Handle uint32
	Offset uint64 // address of the first byte
	Length uint32 // bytes: as offered, or as the peer says that it used

	buf buffer
}

// Contains tells whether the address lies in the segment.
func (s *Segment) Contains(offset uint64) bool {
	return offset-s.Offset < uint64(s.Length)
}

// Place puts data at an address. It returns false, and takes nothing, if that
// is not all inside the segment.
func (s *Segment) Place(offset uint64, data []byte) bool {
	off := offset - s.Offset
	if off > uint64(s.Length) || uint64(len(data)) > uint64(s.Length)-off {
		return false
	}
	s.buf.put(off, data)
	return true
}

// placed says that there are size bytes at an address now, in place of what was
// there, but for those in missing. The bytes themselves are in data if it is
// not nil.
func (s *Segment) placed(offset, size uint64, missing []Range, data []byte) {
	off := offset - s.Offset
	s.buf.clear(off, off+size)
	present(missing, size, func(from, to uint64) {
		if data == nil {
			s.buf.note(off+from, off+to)
		} else {
			s.buf.put(off+from, data[from:to])
		}
	})
}

// Size returns how many bytes of the segment were captured. With padding the number is
// rounded up to a multiple of four, as XDR does. The padding itself is not transferred (RFC
// 8166).
func (s *Segment) Size(padding bool) int {
	n := int(s.buf.have.total(uint64(s.Length)))
	if padding {
		n += xdrPad(n)
	}
	return n
}

// Complete tells whether all bytes are there.
func (s *Segment) Complete() bool { return !s.buf.full && s.buf.have.covers(0, uint64(s.Length)) }

// Missing returns what is not there, counted from Offset.
func (s *Segment) Missing() []Range { return s.buf.have.missing(nil, uint64(s.Length)) }

// Data returns a copy of the Length bytes of the segment. Bytes that are missing are zero.
// With padding, zeros follow up to a multiple of four.
func (s *Segment) Data(padding bool) []byte {
	n := int(s.Length)
	if padding {
		n += xdrPad(n)
	}
	b := make([]byte, n)
	copy(b[:s.Length], s.buf.data)
	return b
}

func xdrPad(n int) int { return -n & 3 }

// view returns [from, to), with zeros for what is missing or was not kept.
func (b *buffer) view(from, to uint64) []byte {
	if to <= uint64(len(b.data)) {
		return b.data[from:to:to]
	}
	v := make([]byte, to-from)
	if from < uint64(len(b.data)) {
		copy(v, b.data[from:])
	}
	return v
}

// Segments are the segments of one side of a connection, by handle. The zero
// value is empty and ready for use. Several segments may have one handle, if
// they do not overlap.
type Segments struct {
	byHandle map[uint32][]*Segment
	n        int
}

// Add enters a segment and returns it. If there is one of that handle and
// offset it gets the new length and keeps its data. Others of the handle that
// overlap it are removed, as handles are used again.
func (t *Segments) Add(handle uint32, offset uint64, length uint32) *Segment {
	list := t.byHandle[handle]
	for _, s := range list {
		if s.Offset == offset {
			s.resize(length, true)
			return s
		}
	}
	for _, s := range slices.Clone(list) {
		if s.Contains(offset) || offset < s.Offset && s.Offset-offset < uint64(length) {
			t.Remove(s)
		}
	}
	s := &Segment{Handle: handle, Offset: offset, Length: length}
	s.buf.keep = uint64(length)
	if t.byHandle == nil {
		t.byHandle = map[uint32][]*Segment{}
	}
	t.byHandle[handle] = append(t.byHandle[handle], s)
	t.n++
	return s
}

// Lookup returns the segment with that handle, the newest if there are several,
// or nil.
func (t *Segments) Lookup(handle uint32) *Segment {
	if list := t.byHandle[handle]; len(list) > 0 {
		return list[len(list)-1]
	}
	return nil
}

// At returns the segment with that handle that has room for size bytes at an
// address, or nil.
func (t *Segments) At(handle uint32, offset, size uint64) *Segment {
	for _, s := range t.byHandle[handle] {
		if off := offset - s.Offset; off <= uint64(s.Length) && size <= uint64(s.Length)-off {
			return s
		}
	}
	return nil
}

// Delete removes the segments with that handle, if there are any.
func (t *Segments) Delete(handle uint32) {
	for _, s := range t.byHandle[handle] {
		t.free(s)
	}
	delete(t.byHandle, handle)
}

// Remove removes one segment, if it is there.
func (t *Segments) Remove(s *Segment) {
	list := t.byHandle[s.Handle]
	i := slices.Index(list, s)
	if i < 0 {
		return
	}
	t.free(s)
	if list = slices.Delete(list, i, i+1); len(list) == 0 {
		delete(t.byHandle, s.Handle)
	} else {
		t.byHandle[s.Handle] = list
	}
}

func (t *Segments) free(s *Segment) {
	s.buf.release()
	t.n--
}

// Len returns the number of segments.
func (t *Segments) Len() int { return t.n }

// Clear removes all segments.
func (t *Segments) Clear() {
	for h := range t.byHandle {
		t.Delete(h)
	}
}
