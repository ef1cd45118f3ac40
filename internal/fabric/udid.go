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

// udID implements ibv.ID for datagrams. It is an address, or one end of a request for the
// queue pair that serves an address.
type udID struct {
	id

	result chan answer // result has the reply to a request, on the side that replies.

	// Below Fabric.mu.
	peer   ibv.UDParam
	qp     *udQP
	groups map[netip.Addr]ibv.JoinFlags
	up     bool // up is set when the request was sent or replied to.
}

// answer is the reply to a request for the queue pair that serves an address.
type answer struct {
	qpn     uint32
	private []byte
	err     error
}

// BindUD takes a port of one of the device's addresses.
func (f *Fabric) BindUD(ctx context.Context, local netip.AddrPort) (ibv.ID, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.has(local.Addr()) {
		return nil, fmt.Errorf("%s: bind %v: %w", providerName, local, errno.EADDRNOTAVAIL)
	}
	local, err := f.bind(&f.udp, local, nil)
	if err != nil {
		return nil, fmt.Errorf("%s: bind %v: %w", providerName, local, err)
	}
	return &udID{id: id{f: f, space: &f.udp, local: local, bound: true}}, nil
}

// ResolveUD takes a port for the way to remote.
func (f *Fabric) ResolveUD(ctx context.Context, local, remote netip.AddrPort) (ibv.ID, error) {
	local, err := f.resolve(ctx, &f.udp, local, remote)
	if err != nil {
		return nil, err
	}
	return &udID{id: id{f: f, space: &f.udp, local: local, remote: remote, bound: true}}, nil
}

// Param returns the zero value: datagrams have no connection.
func (i *udID) Param() ibv.ConnParam { return ibv.ConnParam{} }

// Disconnect is refused: datagrams have no connection.
func (i *udID) Disconnect() error { return ibv.ErrState }

func (i *udID) UDParam() ibv.UDParam {
	i.f.mu.Lock()
	defer i.f.mu.Unlock()
	return i.peer
}

func (i *udID) Connect(ctx context.Context, param ibv.ConnParam) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	result, err := i.ask(param.Private)
	if err != nil {
		return fmt.Errorf("%s: ask for %v: %w", deviceName, i.remote, err)
	}
	select {
	case a := <-result:
		return i.answered(a)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// ask sends the request to the listener.
func (i *udID) ask(private []byte) (chan answer, error) {
	i.f.mu.Lock()
	defer i.f.mu.Unlock()
	switch {
	case i.closed:
		return nil, net.ErrClosed
	case i.up || !i.bound || !i.remote.IsValid():
		return nil, ibv.ErrState
	case len(private) > maxPrivateUD:
		return nil, fmt.Errorf("%d bytes of private data (limit %d): %w", len(private), maxPrivateUD, ibv.ErrLimit)
	}
	i.up = true
	i.f.asked++
	l := i.f.udp.listening(i.remote)
	if l == nil {
		return nil, fmt.Errorf("%w: nobody listens there", errno.ECONNREFUSED)
	}
	result := make(chan answer, 1)
	if !i.f.mute {
		l.offer(&udID{id: id{f: i.f, space: i.space, local: i.remote, remote: i.local, private: slices.Clone(private)}, result: result})
	}
	return result, nil
}

func (i *udID) answered(a answer) error {
	if a.err != nil {
		return a.err
	}
	i.f.mu.Lock()
	defer i.f.mu.Unlock()
	i.private = a.private
	i.peer = ibv.UDParam{QPN: a.qpn, QKey: ibv.QKeyUDP,
		AH: ibv.AHAttr{Port: i.Port(), Global: true, GID: ibv.GIDFromAddr(i.remote.Addr().WithZone(""))}}
	return nil
}

func (i *udID) Accept(ctx context.Context, param ibv.ConnParam) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	i.f.mu.Lock()
	defer i.f.mu.Unlock()
	if i.qp != nil {
		param.QPN = i.qp.num
	}
	if param.QPN == 0 {
		return fmt.Errorf("%s: answer without a queue pair: %w", deviceName, ibv.ErrState)
	}
	return i.answer(answer{qpn: param.QPN, private: slices.Clone(param.Private)}, param.Private)
}

func (i *udID) Reject(private []byte) error {
	i.f.mu.Lock()
	defer i.f.mu.Unlock()
	return i.answer(answer{err: refusal(slices.Clone(private))}, private)
}

// refusal is the error of a Connect that the peer has rejected.
func refusal(private []byte) error {
	return &ibv.RejectError{Private: private, Text: "refused by its program", Err: errno.ECONNREFUSED}
}

// errDropped is the error of a Connect whose request was closed without an answer.
var errDropped = &ibv.RejectError{Text: "nobody answered", Err: errno.ECONNREFUSED}

// answer sends the reply. The caller holds Fabric.mu.
func (i *udID) answer(a answer, private []byte) error {
	switch {
	case i.result == nil || i.up || i.closed:
		return fmt.Errorf("%s: answer: %w", deviceName, ibv.ErrState)
	case len(private) > maxPrivateUD:
		return fmt.Errorf("%s: answer with %d bytes of private data (limit %d): %w", deviceName, len(private), maxPrivateUD, ibv.ErrLimit)
	}
	i.up = true
	i.result <- a
	return nil
}

func (i *udID) Close() error {
	i.f.mu.Lock()
	defer i.f.mu.Unlock()
	switch {
	case i.closed:
		return net.ErrClosed
	case i.qp != nil:
		return fmt.Errorf("%s: close: queue pair %d: %w", deviceName, i.qp.num, ibv.ErrBusy)
	}
	i.release()
	if i.result != nil && !i.up {
		i.up = true
		i.result <- answer{err: errDropped}
	}
	return nil
}
