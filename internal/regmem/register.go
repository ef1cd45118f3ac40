package regmem

import (
	"sync/atomic"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/fault"
)

// Memory of the Go heap may be registered for the time of a call: the garbage collector
// moves nothing, and the caller keeps the slice. So these functions take any memory. A
// Memory that it lies in stays until the registration is closed.

// Expose registers exactly b for the peer of a queue pair of the domain, with the rights
// that access says, until the region is closed. Nobody else gets a right: on a device
// without regions of one queue pair the domain is private.
//
// If the peer may write, b is cleared first, as a peer may say of bytes that it has
// written them when it has not. Where the device cannot register b the error matches
// syscall.ENOBUFS.
//
// If Close of the region returns an error the device may still use b. The second Close
// of a region returns an error and does nothing.
func (d *Domain) Expose(qp ibv.QP, b []byte, access ibv.Access) (ibv.MR, error) {
	m := shareMemory(b)
	var err error
	if access&ibv.AccessRemoteWrite != 0 {
		err = fault.Run(b, func() { clear(b) })
	}
	var mr ibv.MR
	if err == nil {
		mr, err = d.regMR(qp, b, access)
	}
	switch {
	case err != nil:
		m.Return(nil)
		return nil, noMemory(d.Dev, len(b), d.advice.Transfers, err)
	case m != nil:
		h := &borrowingMR{MR: mr}
		h.memory.Store(m)
		return h, nil
	}
	return mr, nil
}

// regMR registers b for the peer of one queue pair of the domain.
func (d *Domain) regMR(qp ibv.QP, b []byte, access ibv.Access) (ibv.MR, error) {
	if d.Private {
		return d.PD.RegMR(b, access)
	}
	return qp.RegMR(b, access)
}

// borrowingMR is a region that borrows the Memory it lies in until it is closed.
type borrowingMR struct {
	ibv.MR
	memory atomic.Pointer[Memory]
}

// Close closes the region and returns the Memory.
func (r *borrowingMR) Close() error {
	err := r.MR.Close()
	if m := r.memory.Swap(nil); m != nil {
		m.Return(err)
	}
	return err
}

// A Registration lets the device use memory by a local key. The zero value is that of no
// memory. It is for one goroutine at a time.
type Registration struct {
	LKey uint32 // LKey is the local key.

	mr     ibv.MR  // mr is what Close closes, nil where the region stays registered.
	memory *Memory // memory is borrowed, nil for memory that belongs to none.
}

// Close ends the registration, and does nothing for the zero value, which r is from then
// on. On an error the device may still use the memory.
func (r *Registration) Close() (err error) {
	if r.mr != nil {
		err = r.mr.Close()
	}
	r.memory.Return(err)
	*r = Registration{}
	return err
}

// RegisterTarget registers b for data that the device puts there: by RDMA Reads of this
// side, and by receives. Nobody else gets a right to it. Where peers may read all the
// same what is registered with their domain, b is cleared first, as it may have another
// peer's data. Where the device cannot register b the error matches syscall.ENOBUFS.
func (d *Domain) RegisterTarget(b []byte) (Registration, error) {
	if d.unchecked {
		if err := fault.Run(b, func() { clear(b) }); err != nil {
			return Registration{}, err
		}
	}
	return d.register(b, ibv.AccessLocalWrite)
}

// RegisterSource registers b for the device to take data from: for RDMA Writes and sends
// of this side. b may be memory that cannot be written. Where the device cannot register
// it the error matches syscall.ENOBUFS.
func (d *Domain) RegisterSource(b []byte) (Registration, error) { return d.register(b, 0) }

func (d *Domain) register(b []byte, access ibv.Access) (Registration, error) {
	r := Registration{memory: shareMemory(b)}
	if r.memory != nil && r.memory.span.ours && !d.unchecked {
		mr, err := r.memory.keepIn(d)
		if err == nil {
			r.LKey = mr.LKey()
			return r, nil
		}
		// The device may have room for the part that is needed.
	}
	mr, err := d.PD.RegMR(b, access)
	if err != nil {
		r.Close()
		return Registration{}, noMemory(d.Dev, len(b), d.advice.Transfers, err)
	}
	r.mr, r.LKey = mr, mr.LKey()
	return r, nil
}
