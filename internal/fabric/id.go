package fabric

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/errno"
)

// id is one end of a question, or an address.
type id struct {
	f             *Fabric
	local, remote netip.AddrPort
	bound         bool // to the port of local

	// Of a question: who hears the answer, on the passive side.
	result  chan answer
	private []byte
	peer    ibv.UDParam

	// Under f.mu.
	qp     *qp
	groups map[netip.Addr]ibv.JoinFlags
	notify func(ibv.Event)
	up     bool
	closed bool
}

type answer struct {
	qpn     uint32
	private []byte
	err     error
}

func (i *id) Device() ibv.Device         { return &i.f.dev }
func (i *id) Port() int                  { return i.f.portOf(i.local.Addr()) }
func (i *id) LocalAddr() netip.AddrPort  { return i.local }
func (i *id) RemoteAddr() netip.AddrPort { return i.remote }
func (i *id) PrivateData() []byte        { return i.private }
func (i *id) MaySendFirst() bool         { return true }
func (i *id) Param() ibv.ConnParam       { return ibv.ConnParam{} }
func (i *id) UDParam() ibv.UDParam       { return i.peer }
func (i *id) Disconnect() error          { return ibv.ErrState }

func (i *id) PathMTU() int {
	i.f.mu.Lock()
	defer i.f.mu.Unlock()
	return i.f.mtu
}

func (i *id) CreateQP(p ibv.PD, init ibv.QPInit) (ibv.QP, error) {
	i.f.mu.Lock()
	defer i.f.mu.Unlock()
	switch {
	case i.closed:
		return nil, net.ErrClosed
	case i.qp != nil:
		return nil, ibv.ErrState
	case init.Cap.MaxSendWR > maxQPWR || init.Cap.MaxRecvWR > maxQPWR || init.Cap.MaxInline > maxInline:
		return nil, ibv.ErrLimit
	}
	i.f.lastQPN++
	q := &qp{f: i.f, id: i, pd: p.(*pd), num: i.f.lastQPN, cap: init.Cap, send: init.SendCQ.(*cq), recv: init.RecvCQ.(*cq), state: ibv.QPSRTS}
	q.send.use(1)
	q.recv.use(1)
	q.pd.users.Add(1)
	i.qp = q
	i.f.qps[q.num] = q
	return q, nil
}

func (i *id) Connect(ctx context.Context, param ibv.ConnParam) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if len(param.Private) > maxPrivate {
		return ibv.ErrLimit
	}
	result := make(chan answer, 1)
	i.f.mu.Lock()
	if i.up || !i.remote.IsValid() {
		i.f.mu.Unlock()
		return ibv.ErrState
	}
	i.up = true
	i.f.asked++
	l := i.f.listening(i.remote)
	if l != nil && !i.f.mute {
		request := &id{f: i.f, local: i.remote, remote: i.local, result: result, private: slices.Clone(param.Private)}
		select {
		case l.ready <- request:
		default:
		}
	}
	i.f.mu.Unlock()
	if l == nil {
		return fmt.Errorf("%w: nobody listens there", errno.ECONNREFUSED)
	}
	select {
	case a := <-result:
		if a.err != nil {
			return a.err
		}
		i.private = a.private
		i.peer = ibv.UDParam{QPN: a.qpn, QKey: ibv.QKeyUDP,
			AH: ibv.AHAttr{Port: 1, Global: true, GID: ibv.GIDFromAddr(i.remote.Addr().WithZone(""))}}
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (i *id) answer(a answer) error {
	i.f.mu.Lock()
	defer i.f.mu.Unlock()
	if i.result == nil || i.up || i.closed {
		return ibv.ErrState
	}
	i.up = true
	i.result <- a
	return nil
}

func (i *id) Accept(_ context.Context, param ibv.ConnParam) error {
	if len(param.Private) > maxPrivate {
		return ibv.ErrLimit
	}
	return i.answer(answer{qpn: param.QPN, private: slices.Clone(param.Private)})
}

func (i *id) Reject(private []byte) error {
	return i.answer(answer{err: &ibv.RejectError{Private: private, Text: "refused by its program", Err: errno.ECONNREFUSED}})
}

func (i *id) Notify(f func(ibv.Event)) {
	i.f.mu.Lock()
	defer i.f.mu.Unlock()
	i.notify = f
}

func (i *id) Close() error {
	i.f.mu.Lock()
	defer i.f.mu.Unlock()
	switch {
	case i.closed:
		return net.ErrClosed
	case i.qp != nil:
		return ibv.ErrBusy
	}
	i.closed = true
	if i.bound {
		delete(i.f.bound, i.local)
	}
	if i.result != nil && !i.up {
		i.up = true
		i.result <- answer{err: &ibv.RejectError{Text: "nobody answered", Err: errno.ECONNREFUSED}}
	}
	return nil
}
