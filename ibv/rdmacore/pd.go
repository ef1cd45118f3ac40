//go:build linux && cgo

package rdmacore

// #include "shim.h"
import "C"

import (
	"errors"
	"fmt"
	"net"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/rdmanet/rdmanet/ibv"
)

// pd implements ibv.PD.
type pd struct {
	dev *device

	mu    sync.Mutex
	c     unsafe.Pointer // c is nil once the domain is closed.
	users int            // users counts regions, queue pairs and address handles.
}

func (d *device) AllocPD() (ibv.PD, error) {
	p := &pd{dev: d}
	if err := errno(C.rn_alloc_pd(d.c, &p.c)); err != nil {
		return nil, fmt.Errorf("%s: allocate protection domain: %w", d.name, err)
	}
	return p, nil
}

// use adds a user. It returns an error if the domain is closed.
func (p *pd) use() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.c == nil {
		return net.ErrClosed
	}
	p.users++
	return nil
}

func (p *pd) unuse() {
	p.mu.Lock()
	p.users--
	p.mu.Unlock()
}

func (p *pd) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.c == nil:
		return net.ErrClosed
	case p.users > 0:
		return fmt.Errorf("%s: close protection domain: %d users: %w", p.dev.name, p.users, ibv.ErrBusy)
	}
	if err := errno(C.rn_dealloc_pd(p.c)); err != nil {
		return fmt.Errorf("%s: close protection domain: %w", p.dev.name, err)
	}
	p.c = nil
	return nil
}

// mr implements ibv.MR.
type mr struct {
	pd     *pd
	buf    []byte
	handle C.uintptr_t // handle keeps the memory reachable for the device.

	lkey, rkey uint32

	mu sync.Mutex
	c  *C.struct_rn_mr // c is nil once the region is closed.
}

func (p *pd) RegMR(buf []byte, access ibv.Access) (ibv.MR, error) {
	if len(buf) == 0 {
		return nil, fmt.Errorf("%s: register memory: no bytes: %w", p.dev.name, syscall.EINVAL)
	}
	if access&(ibv.AccessRemoteWrite|ibv.AccessRemoteAtomic) != 0 && access&ibv.AccessLocalWrite == 0 {
		return nil, fmt.Errorf("%s: register memory: a remote right to write needs the local one: %w", p.dev.name, syscall.EINVAL)
	}
	if err := p.use(); err != nil {
		return nil, fmt.Errorf("%s: register memory: %w", p.dev.name, err)
	}
	m := &mr{pd: p, buf: buf}
	addr := C.uintptr_t(uintptr(unsafe.Pointer(unsafe.SliceData(buf))))
	// The bits of ibv.Access are those of enum ibv_access_flags.
	if err := errno(C.rn_reg_mr(p.c, addr, C.size_t(len(buf)), C.int(access), &m.c)); err != nil {
		p.unuse()
		return nil, fmt.Errorf("%s: register %d bytes: %w", p.dev.name, len(buf), memoryError(err))
	}
	m.handle = addHandle(m)
	m.lkey, m.rkey = uint32(m.c.lkey), uint32(m.c.rkey)
	return m, nil
}

// RegMR returns an error that matches errors.ErrUnsupported. A region of libibverbs is open
// to its whole domain, and cannot be tied to a queue pair.
func (q *qp) RegMR([]byte, ibv.Access) (ibv.MR, error) {
	return nil, ibv.Unsupported(q.dev.name, "memory regions of one queue pair")
}

// memoryError adds advice to the error if the kernel refuses to pin memory.
func memoryError(err error) error {
	if !errors.Is(err, syscall.ENOMEM) && !errors.Is(err, syscall.EPERM) {
		return err
	}
	var lim unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_MEMLOCK, &lim) != nil || lim.Cur == unix.RLIM_INFINITY {
		return err
	}
	return fmt.Errorf("%w: the limit of locked memory is %d KiB; raise it (ulimit -l unlimited, LimitMEMLOCK=infinity in a "+
		"systemd unit, memlock in /etc/security/limits.conf)", err, lim.Cur>>10)
}

func (m *mr) LKey() uint32 { return m.lkey }
func (m *mr) RKey() uint32 { return m.rkey }
func (m *mr) Addr() uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(m.buf)))) }
func (m *mr) Len() int     { return len(m.buf) }

func (m *mr) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.c == nil {
		return net.ErrClosed
	}
	if err := errno(C.rn_dereg_mr(m.c)); err != nil {
		if errors.Is(err, syscall.EBUSY) {
			err = ibv.ErrBusy
		}
		return fmt.Errorf("%s: close memory region: %w", m.pd.dev.name, err)
	}
	m.c = nil
	removeHandle(m.handle)
	if m.pd.dev.siw {
		m.pd.dev.all(func(i *id) { i.endReads(m.lkey) })
	}
	m.pd.unuse()
	return nil
}

// endReads ends the connection if an RDMA Read fills the closed region with this key. siw
// checks the key only when the Read starts.
func (i *id) endReads(lkey uint32) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.qp != nil && i.qp.sq.ledger.readsInto(lkey) {
		i.qp.fail()
	}
}
