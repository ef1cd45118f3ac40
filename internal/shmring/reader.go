package shmring

import "github.com/rdmanet/rdmanet/internal/fault"

// A Reader is the reading side of a direction. One goroutine uses it at a time, and another
// one, at the same time, may use the Writer of the same end.
type Reader struct {
	own, peer Page
	ring      []byte
	pos       uint64 // pos is the position of the next byte to read.
	move      uint32 // move is the last move of the peer that was followed.
	cpu       uint32
	woken     uint32 // woken is the sleep of the peer's writer for which the doorbell was rung.
	nap       nap
}

// NewReader returns the reader of the end whose page is own. It begins with the ring in the
// peer's page.
func NewReader(own, peer Page) *Reader {
	return &Reader{own: own, peer: peer, ring: peer.small(), nap: nap{word: own.u32(offRecvNap)}}
}

// ready returns how many bytes of the ring can be read. moved is set if there are none, and
// those that follow are in another ring.
func (r *Reader) ready() (n int, moved bool, err error) {
	ready := r.peer.u64(offTail).Load() - r.pos
	raceAcquire()
	if move := r.peer.u32(offMove).Load(); move != r.move {
		if move != r.move+1 {
			return 0, false, ErrCorrupt
		}
		// The tail was loaded before, so it may be that of a time before the move.
		if before := r.peer.u64(offMoveAt).Load() - r.pos; before <= ready {
			ready, moved = before, before == 0
		}
	}
	if ready > uint64(len(r.ring)) {
		return 0, false, ErrCorrupt
	}
	return int(ready), moved, nil
}

// Next says what Read finds. Of several that are true, the first is meant.
type Next uint8

const (
	Nothing Next = iota // Nothing means that the reader has to wait.
	Bytes               // Bytes means that there are some.
	Moved               // Moved means that Follow must be called.
	Ended               // Ended means that no byte follows.
)

// Peek says what is next.
func (r *Reader) Peek() (Next, error) {
	next, err := r.bytes()
	if next == Nothing && err == nil && End(r.peer.u32(offEnd).Load()) != Open {
		// The end was stored behind all bytes.
		if next, err = r.bytes(); next == Nothing && err == nil {
			next = Ended
		}
	}
	return next, err
}

func (r *Reader) bytes() (Next, error) {
	n, moved, err := r.ready()
	switch {
	case err != nil:
		return Nothing, err
	case n > 0:
		return Bytes, nil
	case moved:
		return Moved, nil
	}
	return Nothing, nil
}

// Ending returns how the direction has ended, after Peek has returned Ended.
func (r *Reader) Ending() End {
	if End(r.peer.u32(offEnd).Load()) == Finished {
		return Finished
	}
	return Reset
}

// NextRing returns the size of the ring that Follow needs, 0 for that in the peer's page.
func (r *Reader) NextRing() (int, error) {
	n := int(r.peer.u32(offMoveLen).Load())
	if n != 0 && !validRing(n) {
		return 0, ErrCorrupt
	}
	return n, nil
}

// Follow goes on with the peer's next ring after Peek has returned Moved. mem is what
// NextRing asked for, or nil for the ring in the page. The ring so far is not used any more.
func (r *Reader) Follow(mem []byte) {
	if mem == nil {
		mem = r.peer.small()
	}
	r.ring = mem
	r.move++
	r.own.u32(offMoved).Store(r.move)
}

// Read copies bytes from the ring, and returns how many. It does not go beyond a move. wake
// is set when the doorbell must be rung.
func (r *Reader) Read(bufs [][]byte) (n int, wake bool, err error) {
	for _, b := range bufs {
		for len(b) > 0 {
			ready, _, err := r.ready()
			if err != nil || ready == 0 {
				return n, wake, err
			}
			origin := r.peer.origin(r.move).Load()
			at := int(r.pos-origin) & (len(r.ring) - 1)
			k, err := fault.Copy(b[:min(len(b), piece)], r.ring[at:min(at+ready, len(r.ring))])
			if err != nil {
				return n, wake, err
			}
			b = b[k:]
			n += k
			r.pos += uint64(k)
			r.own.u64(offHead).Store(r.pos)
			// A writer that sleeps is woken when half of the ring is free, and not for
			// every byte.
			if ready-k <= len(r.ring)/2 {
				wake = due(r.peer.u32(offSendNap), &r.woken) || wake
			}
		}
	}
	return n, wake, nil
}

// Sleep says that the reader will sleep. It returns true if there is no need to: Peek finds
// something, or fails. Otherwise the doorbell will be rung, and Awake must be called after
// that.
func (r *Reader) Sleep() (awake bool) {
	r.nap.begin()
	next, err := r.Peek()
	if next == Nothing && err == nil {
		return false
	}
	r.nap.end()
	return true
}

// Awake says that the reader does not sleep any more.
func (r *Reader) Awake() { r.nap.end() }

// SetCPU tells the peer which processor the reader runs on.
func (r *Reader) SetCPU(n uint32) {
	if r.cpu != n+1 {
		r.cpu = n + 1
		r.own.u32(offRecvCPU).Store(n + 1)
	}
}

// PeerCPU returns the processor on which the peer's writer was last, if it has said so.
func (r *Reader) PeerCPU() (n uint32, ok bool) {
	n = r.peer.u32(offSendCPU).Load()
	return n - 1, n != 0
}
