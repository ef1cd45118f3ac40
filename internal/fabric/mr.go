package fabric

import (
	"fmt"
	"net"
	"syscall"
	"unsafe"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/errno"
)

// mr implements ibv.MR. Its remote address is the address in memory, and its two keys are
// the same.
type mr struct {
	pd     *pd
	owner  *rcQP // its peer alone may name the remote key; nil allows all of the domain
	buf    []byte
	key    uint32
	access ibv.Access

	// Below Fabric.gate.
	invalidated bool // the keys open nothing any more
	closed      bool
}

// regions is the table of a device's regions. The upper 24 bits of a key are a place in
// slots. The lower 8 differ between the regions that have the place one after the other.
type regions struct {
	slots []regionSlot // the first one stays empty: no key is 0
	free  []uint32     // empty slots
}

type regionSlot struct {
	mr      *mr
	variant uint8
}

// find returns the region of a key, or nil.
func (r *regions) find(key uint32) *mr {
	at := key >> 8
	if at >= uint32(len(r.slots)) {
		return nil
	}
	if m := r.slots[at].mr; m != nil && m.key == key {
		return m
	}
	return nil
}

// add gives a region its key. It reports whether the table had room.
func (r *regions) add(m *mr) bool {
	if len(r.free) == 0 {
		if len(r.slots) > maxMR {
			return false
		}
		if len(r.slots) == 0 {
			r.slots = make([]regionSlot, 1)
		}
		r.free = append(r.free, uint32(len(r.slots)))
		r.slots = append(r.slots, regionSlot{})
	}
	at := r.free[len(r.free)-1]
	r.free = r.free[:len(r.free)-1]
	s := &r.slots[at]
	s.variant++
	s.mr = m
	m.key = at<<8 | uint32(s.variant)
	return true
}

func (r *regions) remove(m *mr) {
	at := m.key >> 8
	r.slots[at].mr = nil
	r.free = append(r.free, at)
}

func (p *pd) RegMR(buf []byte, access ibv.Access) (ibv.MR, error) {
	m, err := p.register(nil, buf, access)
	if err != nil {
		return nil, fmt.Errorf("%s: register memory: %w", deviceName, err)
	}
	return m, nil
}

func (p *pd) register(owner *rcQP, buf []byte, access ibv.Access) (*mr, error) {
	switch {
	case len(buf) == 0:
		return nil, fmt.Errorf("no bytes: %w", syscall.EINVAL)
	case access&ibv.AccessRemoteAtomic != 0:
		return nil, ibv.Unsupported(deviceName, "remote atomics")
	case access&ibv.AccessRemoteWrite != 0 && access&ibv.AccessLocalWrite == 0:
		return nil, fmt.Errorf("remote write without local write: %w", syscall.EINVAL)
	}
	p.f.gate.Lock()
	defer p.f.gate.Unlock()
	if p.closed {
		return nil, fmt.Errorf("protection domain: %w", net.ErrClosed)
	}
	m := &mr{pd: p, owner: owner, buf: buf, access: access}
	if !p.f.regions.add(m) {
		return nil, fmt.Errorf("more than %d regions: %w", maxMR, errno.ENOMEM)
	}
	p.users++
	return m, nil
}

func (m *mr) LKey() uint32 { return m.key }
func (m *mr) RKey() uint32 { return m.key }
func (m *mr) Addr() uint64 { return address(m.buf) }
func (m *mr) Len() int     { return len(m.buf) }

func (m *mr) Close() error {
	f := m.pd.f
	f.gate.Lock()
	defer f.gate.Unlock()
	if m.closed {
		return net.ErrClosed
	}
	m.closed = true
	f.regions.remove(m)
	m.pd.users--
	return nil
}

func address(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

// window returns the n bytes at an address, or false if the region does not hold them all.
func (m *mr) window(addr uint64, n int) ([]byte, bool) {
	base, size := address(m.buf), uint64(len(m.buf))
	if addr < base || addr-base > size || uint64(n) > size-(addr-base) {
		return nil, false
	}
	off := int(addr - base)
	return m.buf[off : off+n : off+n], true
}

// mayUse reports whether the elements lie in regions of the domain. With write the device
// must be allowed to fill them. The caller holds Fabric.gate.
func (p *pd) mayUse(sgl []ibv.SGE, write bool) bool {
	for i := range sgl {
		e := &sgl[i]
		if len(e.Buf) == 0 {
			continue
		}
		m := p.f.regions.find(e.LKey)
		if m == nil || m.pd != p || m.invalidated || write && m.access&ibv.AccessLocalWrite == 0 {
			return false
		}
		if _, inside := m.window(address(e.Buf), len(e.Buf)); !inside {
			return false
		}
	}
	return true
}

// remote returns the region that the peer of a queue pair may name with the key, or nil.
// The caller holds Fabric.gate.
func (q *rcQP) remote(key uint32) *mr {
	m := q.f.regions.find(key)
	if m == nil || m.pd != q.pd || m.invalidated || m.owner != nil && m.owner != q {
		return nil
	}
	return m
}

// window returns the memory that the peer of a queue pair names, or false if the peer has
// not the right to it. The caller holds Fabric.gate.
func (q *rcQP) window(key uint32, addr uint64, n int, right ibv.Access) ([]byte, bool) {
	m := q.remote(key)
	if m == nil || m.access&right == 0 {
		return nil, false
	}
	return m.window(addr, n)
}

// invalidate takes a key back on behalf of the peer of a queue pair. It reports whether the
// peer may do so, which it may not for a region without a remote right. The caller holds
// Fabric.gate for writing.
func (q *rcQP) invalidate(key uint32) bool {
	m := q.remote(key)
	if m == nil || m.access&(ibv.AccessRemoteRead|ibv.AccessRemoteWrite) == 0 {
		return false
	}
	m.invalidated = true
	return true
}
