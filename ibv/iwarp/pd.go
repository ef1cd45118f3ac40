package iwarp

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"syscall"
	"unsafe"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/iwarpwire"
)

// pd implements ibv.PD. It is a table of the STags that its queue pairs may use.
type pd struct {
	dev *device

	// gate is held for reading while registered memory is used, around non-blocking calls
	// only. It is held for writing while a region is taken away. So the Close of a region
	// waits for a copy under way, and for nothing else.
	gate sync.RWMutex

	// gate guards these.
	mrs    map[uint32]*mr // mrs has the regions by STag.
	qps    int
	closed bool
}

// mr implements ibv.MR. Remote addresses (TO) start at a random base. So the peer learns
// nothing about the layout of the process. An address without the base is out of bounds,
// and never right by accident.
type mr struct {
	pd     *pd
	qp     *qp // qp is the queue pair whose peer alone may name the key, nil for all of the domain.
	buf    []byte
	base   uint64
	stag   uint32
	access ibv.Access

	// pd.gate guards these.
	dead   bool // dead is set when the key opens nothing any more.
	closed bool
}

func (d *device) AllocPD() (ibv.PD, error) {
	return &pd{dev: d, mrs: make(map[uint32]*mr)}, nil
}

func (p *pd) RegMR(buf []byte, access ibv.Access) (ibv.MR, error) {
	return p.register(nil, buf, access)
}

// RegMR makes a region whose STag is associated with the stream of the queue pair, for
// which RFC 5040, section 4.8, has errors.
func (q *qp) RegMR(buf []byte, access ibv.Access) (ibv.MR, error) {
	if q.closed.Load() {
		return nil, fmt.Errorf("%s: register memory: queue pair closed: %w", Name, ibv.ErrState)
	}
	return q.pd.register(q, buf, access)
}

func (p *pd) register(q *qp, buf []byte, access ibv.Access) (ibv.MR, error) {
	if len(buf) == 0 {
		return nil, fmt.Errorf("%s: register memory: no bytes: %w", Name, syscall.EINVAL)
	}
	if access&(ibv.AccessRemoteWrite|ibv.AccessRemoteAtomic) != 0 && access&ibv.AccessLocalWrite == 0 {
		return nil, fmt.Errorf("%s: register memory: remote write without local write: %w", Name, syscall.EINVAL)
	}
	if access&ibv.AccessRemoteAtomic != 0 {
		return nil, ibv.Unsupported(Name, "remote atomics")
	}
	var r [12]byte
	p.gate.Lock()
	defer p.gate.Unlock()
	if p.closed {
		return nil, fmt.Errorf("%s: register memory: %w", Name, errPDClosed)
	}
	for {
		rand.Read(r[:])
		// RFC 5040, section 8.1: nobody must be able to guess keys. 0 is never valid.
		stag := binary.BigEndian.Uint32(r[:])
		if stag == 0 || p.mrs[stag] != nil {
			continue
		}
		// The base has 47 random bits and is page aligned, like the address of a mapping.
		// base+len cannot overflow.
		base := binary.BigEndian.Uint64(r[4:]) >> 17 &^ 4095
		m := &mr{pd: p, qp: q, buf: buf, base: base + 4096, stag: stag, access: access}
		p.mrs[stag] = m
		return m, nil
	}
}

var errPDClosed = errors.New("protection domain closed")

func (p *pd) Close() error {
	p.gate.Lock()
	defer p.gate.Unlock()
	if p.closed {
		return fmt.Errorf("%s: %w", Name, errPDClosed)
	}
	if p.qps > 0 || len(p.mrs) > 0 {
		return fmt.Errorf("%s: protection domain with %d queue pairs and %d memory regions: %w",
			Name, p.qps, len(p.mrs), ibv.ErrBusy)
	}
	p.closed = true
	return nil
}

func (p *pd) addQP() error {
	p.gate.Lock()
	defer p.gate.Unlock()
	if p.closed {
		return errPDClosed
	}
	p.qps++
	return nil
}

func (p *pd) removeQP() {
	p.gate.Lock()
	p.qps--
	p.gate.Unlock()
}

func (m *mr) LKey() uint32 { return m.stag }
func (m *mr) RKey() uint32 { return m.stag }
func (m *mr) Addr() uint64 { return m.base }
func (m *mr) Len() int     { return len(m.buf) }

func (m *mr) Close() error {
	m.pd.gate.Lock()
	defer m.pd.gate.Unlock()
	if m.closed {
		return fmt.Errorf("%s: memory region closed twice", Name)
	}
	m.closed, m.dead = true, true
	delete(m.pd.mrs, m.stag)
	return nil
}

// local returns the region of a scatter/gather element. The caller holds the gate for
// reading.
func (p *pd) local(s *ibv.SGE, write bool) (*mr, ibv.WCStatus) {
	m := p.mrs[s.LKey]
	if m == nil || m.dead || !m.holds(s.Buf) || write && m.access&ibv.AccessLocalWrite == 0 {
		return nil, ibv.WCLocProtErr
	}
	return m, ibv.WCSuccess
}

// holds reports whether b lies within the region.
func (m *mr) holds(b []byte) bool {
	if len(b) == 0 {
		return true
	}
	start, end := addr(m.buf), addr(m.buf)+uintptr(len(m.buf))
	return addr(b) >= start && addr(b) <= end && uintptr(len(b)) <= end-addr(b)
}

func addr(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

// offset returns the tagged offset of a part of the region.
func (m *mr) offset(b []byte) uint64 {
	if len(b) == 0 {
		return m.base
	}
	return m.base + uint64(addr(b)-addr(m.buf))
}

// open reports whether the peer of q may name the key.
func (m *mr) open(q *qp) bool { return m.qp == nil || m.qp == q }

// window returns the n bytes at the tagged offset to, if the peer may use them. write is
// set for an RDMA Write, and not for a Read Request, because their errors belong to
// different layers. The caller holds the gate for reading.
func (q *qp) window(stag uint32, to, n uint64, write bool) (*mr, []byte, *iwarpwire.TermError) {
	eSTag, eStream, eBounds, eAccess, eWrap := iwarpwire.ErrInvalidSTag, iwarpwire.ErrTaggedNotAssociated,
		iwarpwire.ErrBaseBounds, iwarpwire.ErrInvalidSTag, iwarpwire.ErrTaggedWrap
	right := ibv.AccessRemoteWrite
	if !write {
		eSTag, eStream, eBounds, eAccess, eWrap = iwarpwire.ErrRemoteInvalidSTag, iwarpwire.ErrSTagNotAssociated,
			iwarpwire.ErrRemoteBounds, iwarpwire.ErrRemoteAccess, iwarpwire.ErrTOWrap
		right = ibv.AccessRemoteRead
	}
	if to+n < to {
		return nil, nil, eWrap
	}
	m := q.pd.mrs[stag]
	switch {
	case m == nil || m.dead:
		return nil, nil, eSTag
	case !m.open(q):
		return nil, nil, eStream
	case m.access&right == 0:
		return nil, nil, eAccess // DDP has no code for a missing right.
	case to < m.base || to-m.base > uint64(len(m.buf)) || n > uint64(len(m.buf))-(to-m.base):
		return nil, nil, eBounds
	}
	off := to - m.base
	return m, m.buf[off : off+n], nil
}

// invalidate makes the key invalid. The region stays registered until its Close. The peer
// cannot invalidate the key of a region that was never open to it. Neither the peer nor
// this side can invalidate a key of another queue pair here.
func (q *qp) invalidate(stag uint32, remote bool) *iwarpwire.TermError {
	q.pd.gate.Lock()
	defer q.pd.gate.Unlock()
	m := q.pd.mrs[stag]
	switch {
	case m == nil || m.dead:
		return iwarpwire.ErrCannotInvalidate
	case !m.open(q):
		return iwarpwire.ErrSTagNotAssociated
	case remote && m.access&(ibv.AccessRemoteRead|ibv.AccessRemoteWrite) == 0:
		return iwarpwire.ErrCannotInvalidate
	}
	m.dead = true
	return nil
}
