package fabric

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"syscall"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/errno"
)

// rcID implements ibv.ID for connections.
type rcID struct {
	id
	passive bool

	// answer, of a request, takes the result of Connect.
	answer chan error

	// Below Fabric.mu.
	stage stage
	qp    *rcQP
	asker *rcID // of a request: the ID whose Connect waits
	peer  *rcID // the other end of the connection
	param ibv.ConnParam
}

// stage is how far an ID has come.
type stage uint8

const (
	stageNew     stage = iota // Connect has not been called
	stageAsked                // the request waits for its answer
	stageRefused              // the request was refused
	stageGivenUp              // the active side does not wait for the answer any more
	stageUp                   // the connection is up
	stageOver                 // either side has ended the connection
)

var errConnected = fmt.Errorf("%s: queue pair of a connection: %w", deviceName, syscall.EINVAL)

// Resolve takes a port for the way to remote.
func (f *Fabric) Resolve(ctx context.Context, local, remote netip.AddrPort) (ibv.ID, error) {
	local, err := f.resolve(ctx, &f.tcp, local, remote)
	if err != nil {
		return nil, err
	}
	return &rcID{id: id{f: f, space: &f.tcp, local: local, remote: remote, bound: true}}, nil
}

func (i *rcID) Param() ibv.ConnParam {
	i.f.mu.Lock()
	defer i.f.mu.Unlock()
	return i.param
}

// UDParam returns the zero value: it belongs to datagrams.
func (i *rcID) UDParam() ibv.UDParam { return ibv.UDParam{} }

// JoinMulticast is refused: groups are for datagrams.
func (i *rcID) JoinMulticast(context.Context, netip.Addr, ibv.JoinFlags) (ibv.UDParam, error) {
	return ibv.UDParam{}, fmt.Errorf("%s: join a group for a connection: %w", deviceName, ibv.ErrState)
}

// LeaveMulticast is refused: groups are for datagrams.
func (i *rcID) LeaveMulticast(group netip.Addr) error {
	return fmt.Errorf("%s: leave %v: %w", deviceName, group, errno.EADDRNOTAVAIL)
}

func (i *rcID) Connect(ctx context.Context, param ibv.ConnParam) error {
	if err := i.connect(ctx, &param); err != nil {
		return fmt.Errorf("%s: connect to %v: %w", deviceName, i.remote, err)
	}
	return nil
}

func (i *rcID) connect(ctx context.Context, param *ibv.ConnParam) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	request, err := i.ask(param)
	if err != nil {
		return err
	}
	select {
	case err := <-request.answer:
		return err
	case <-ctx.Done():
	}
	if request.withdraw() {
		return ctx.Err()
	}
	return <-request.answer
}

// ask hands a request to the listener.
func (i *rcID) ask(param *ibv.ConnParam) (*rcID, error) {
	i.f.mu.Lock()
	defer i.f.mu.Unlock()
	if err := i.check(param, false); err != nil {
		return nil, err
	}
	l := i.f.tcp.listening(i.remote)
	if l == nil {
		return nil, fmt.Errorf("%w: nobody listens there", errno.ECONNREFUSED)
	}
	request := &rcID{id: id{f: i.f, space: i.space, local: i.remote, remote: i.local, private: slices.Clone(param.Private)},
		passive: true, stage: stageAsked, asker: i, answer: make(chan error, 1),
		param: ibv.ConnParam{ResponderResources: param.InitiatorDepth, InitiatorDepth: param.ResponderResources}}
	if !l.offer(request) {
		return nil, &ibv.RejectError{Text: "too many requests wait there", Err: errno.ECONNREFUSED}
	}
	i.stage = stageAsked
	i.param = *param
	return request, nil
}

// check reports why the connection cannot be made. The caller holds Fabric.mu.
func (i *rcID) check(param *ibv.ConnParam, passive bool) error {
	switch {
	case i.f.removed:
		return errno.ENODEV
	case i.closed:
		return net.ErrClosed
	case i.passive != passive || i.qp == nil || !passive && i.stage != stageNew:
		return ibv.ErrState
	case passive && i.stage == stageGivenUp:
		return fmt.Errorf("the peer has given up: %w", errno.ECONNRESET)
	case passive && i.stage != stageAsked:
		return ibv.ErrState
	case len(param.Private) > maxPrivate:
		return errPrivate(param.Private)
	case param.ResponderResources < 0 || param.InitiatorDepth < 0 ||
		param.ResponderResources > maxRdAtom || param.InitiatorDepth > maxRdAtom:
		return fmt.Errorf("%d and %d RDMA Reads at a time (limit %d): %w",
			param.ResponderResources, param.InitiatorDepth, maxRdAtom, ibv.ErrLimit)
	}
	return nil
}

func errPrivate(private []byte) error {
	return fmt.Errorf("%d bytes of private data (limit %d): %w", len(private), maxPrivate, ibv.ErrLimit)
}

// withdraw gives a request up. It reports false if the request has an answer already.
func (i *rcID) withdraw() bool {
	i.f.mu.Lock()
	defer i.f.mu.Unlock()
	if i.stage != stageAsked {
		return false
	}
	i.stage = stageGivenUp
	i.asker = nil
	return true
}

// Accept brings both queue pairs up.
func (i *rcID) Accept(ctx context.Context, param ibv.ConnParam) error {
	err := ctx.Err()
	if err == nil {
		err = i.accept(&param)
	}
	if err != nil {
		return fmt.Errorf("%s: accept from %v: %w", deviceName, i.remote, err)
	}
	return nil
}

func (i *rcID) accept(param *ibv.ConnParam) error {
	i.f.mu.Lock()
	defer i.f.mu.Unlock()
	if err := i.check(param, true); err != nil {
		return err
	}
	// Each side may have as many RDMA Reads outstanding as it asks for and as the other serves.
	a := i.asker
	mine := min(param.InitiatorDepth, a.param.ResponderResources)
	its := min(a.param.InitiatorDepth, param.ResponderResources)
	if a.qp == nil || !establish(i.qp, a.qp, mine, its) {
		return fmt.Errorf("queue pairs in the wrong state: %w", ibv.ErrState)
	}
	i.param = ibv.ConnParam{InitiatorDepth: mine, ResponderResources: param.ResponderResources}
	a.param = ibv.ConnParam{InitiatorDepth: its, ResponderResources: a.param.ResponderResources}
	a.private = slices.Clone(param.Private)
	i.peer, a.peer = a, i
	i.stage, a.stage = stageUp, stageUp
	i.asker = nil
	i.answer <- nil
	return nil
}

func (i *rcID) Reject(private []byte) error {
	i.f.mu.Lock()
	defer i.f.mu.Unlock()
	var err error
	switch {
	case i.closed:
		err = net.ErrClosed
	case i.stage != stageAsked || !i.passive:
		err = ibv.ErrState
	case len(private) > maxPrivate:
		err = errPrivate(private)
	}
	if err != nil {
		return fmt.Errorf("%s: reject: %w", deviceName, err)
	}
	i.refuse(refusal(slices.Clone(private)))
	return nil
}

// refuse answers a request with an error. The caller holds Fabric.mu.
func (i *rcID) refuse(err error) {
	i.stage = stageRefused
	i.asker = nil
	i.answer <- err
}

func (i *rcID) Disconnect() error {
	i.f.mu.Lock()
	var err error
	switch {
	case i.closed:
		err = net.ErrClosed
	case i.peer == nil:
		err = ibv.ErrState
	}
	i.f.mu.Unlock()
	if err != nil {
		return fmt.Errorf("%s: disconnect: %w", deviceName, err)
	}
	i.disconnect()
	return nil
}

// disconnect ends the connection, if there is one. Both queue pairs are flushed, and then both
// programs get the event.
func (i *rcID) disconnect() {
	var qps []*rcQP
	var open []*rcID
	i.f.mu.Lock()
	if i.stage == stageUp {
		for _, end := range []*rcID{i, i.peer} {
			end.stage = stageOver
			if end.qp != nil {
				qps = append(qps, end.qp)
			}
			if !end.closed {
				open = append(open, end)
			}
		}
	}
	i.f.mu.Unlock()
	for _, q := range qps {
		q.end()
	}
	for _, end := range open {
		end.raise(ibv.Event{Kind: ibv.EventDisconnected})
	}
}

func (i *rcID) Close() error {
	if err := i.close(); err != nil {
		return err
	}
	i.disconnect()
	return nil
}

func (i *rcID) close() error {
	i.f.mu.Lock()
	defer i.f.mu.Unlock()
	switch {
	case i.closed:
		return net.ErrClosed
	case i.qp != nil:
		return fmt.Errorf("%s: close: queue pair %d: %w", deviceName, i.qp.num, ibv.ErrBusy)
	}
	i.release()
	if i.passive && i.stage == stageAsked {
		i.refuse(errDropped)
	}
	return nil
}
