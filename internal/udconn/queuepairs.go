package udconn

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/cqwait"
	"github.com/rdmanet/rdmanet/internal/errno"
)

// queuePairs has the queue pairs of a Conn, one for each port of a device that is in use.
type queuePairs struct {
	*shared
	provider ibv.Provider
	owner    owner
	recv     *receiver
	send     *sender

	opening sync.Mutex // opening is held while a queue pair is made.

	// all and limit are changed with receiver.mu and sender.mu held.
	all   []*queuePair
	limit int // limit is the greatest length of a datagram, in bytes; 0 means unknown.
}

// limitOfAll finds the limit where any device of the provider may be used.
func (s *queuePairs) limitOfAll() error {
	devs, err := s.provider.Devices()
	if err != nil {
		return err
	}
	why, found := fmt.Errorf("%s: no device for datagrams: %w", s.provider.Name(), errors.ErrUnsupported), false
	for _, dev := range devs {
		if err := supported(dev); err != nil {
			why = err
			continue
		}
		found = true
		for port := 1; port <= dev.Attr().Ports; port++ {
			attr, err := dev.Port(port)
			if err != nil {
				return err
			}
			if attr.State == ibv.PortActive && (s.limit == 0 || attr.ActiveMTU < s.limit) {
				s.limit = min(attr.ActiveMTU, maxPayload)
			}
		}
	}
	switch {
	case !found:
		return why
	case s.limit == 0:
		return fmt.Errorf("%s: all ports are down: %w", s.provider.Name(), errno.ENETDOWN)
	}
	return nil
}

// supported returns an error for a device without datagrams, or with datagrams that carry no
// IP address of their sender, as those of InfiniBand.
func supported(dev ibv.Device) error {
	attr := dev.Attr()
	switch {
	case !attr.Caps.Has(ibv.CapUD):
		return ibv.Unsupported(dev.Name(), "datagrams (UD queue pairs)")
	case attr.Transport != ibv.TransportRoCE:
		return ibv.Unsupported(dev.Name(), "datagrams from IP addresses over "+attr.Transport.String())
	}
	return nil
}

// open returns the queue pair of the device that has a local address, and makes it if need
// be.
func (s *queuePairs) open(ctx context.Context, ip netip.Addr) (*queuePair, error) {
	s.opening.Lock()
	defer s.opening.Unlock()
	id, err := s.provider.BindUD(ctx, netip.AddrPortFrom(ip, 0))
	if err != nil {
		return nil, err
	}
	if q := s.find(id.Device(), id.Port()); q != nil {
		return q, id.Close()
	}
	if err := supported(id.Device()); err != nil {
		return nil, errors.Join(err, id.Close())
	}
	limit, err := portMTU(id.Device(), id.Port())
	if err != nil {
		return nil, errors.Join(err, id.Close())
	}
	q, err := newQueuePair(s.shared, s.owner, s.recv, s.send, id)
	if err != nil {
		return nil, err
	}
	s.recv.mu.Lock()
	defer s.recv.mu.Unlock()
	s.send.mu.Lock()
	defer s.send.mu.Unlock()
	if s.closed.Load() {
		return nil, errors.Join(net.ErrClosed, q.close())
	}
	if s.limit == 0 {
		s.limit = limit
	}
	s.add(q)
	return q, nil
}

// add takes a queue pair into use. The caller holds receiver.mu and sender.mu.
func (s *queuePairs) add(q *queuePair) {
	ledByReaders := s.recv.first == nil
	background := cqwait.Always
	if ledByReaders {
		background = cqwait.WhenVacant
	}
	q.start(background)
	s.all = append(s.all, q)
	s.recv.add(&q.recv)
	s.send.add(&q.send.wait)
	q.id.Notify(q.event) // An event before this could not drop the queue pair.
	if !ledByReaders {
		s.wg.Go(q.recv.wait.Run)
		return
	}
	q.recv.wait.Start()
	s.recv.readers.WakeAll() // One of those that wait leads.
}

// forID returns the queue pair of the device and port of an ID, and makes it if need be.
func (s *queuePairs) forID(ctx context.Context, id ibv.ID) (*queuePair, error) {
	if q := s.find(id.Device(), id.Port()); q != nil {
		return q, nil
	}
	return s.open(ctx, id.LocalAddr().Addr())
}

func (s *queuePairs) find(dev ibv.Device, port int) *queuePair {
	s.send.mu.Lock()
	defer s.send.mu.Unlock()
	for _, q := range s.all {
		if q.id.Device() == dev && q.id.Port() == port {
			return q
		}
	}
	return nil
}

// remove ends the use of a queue pair that has failed, and reports false if that was done
// before. What needs a queue pair makes another one. The caller closes this one.
func (s *queuePairs) remove(q *queuePair, cause error) bool {
	if !s.unlist(q, cause) {
		return false
	}
	q.send.stop()
	return true
}

func (s *queuePairs) unlist(q *queuePair, cause error) bool {
	s.recv.mu.Lock()
	defer s.recv.mu.Unlock()
	s.send.mu.Lock()
	i := slices.Index(s.all, q)
	if i < 0 {
		s.send.mu.Unlock()
		return false
	}
	s.Log.Debug("rdmanet: queue pair for datagrams failed", "device", q.id.Device().Name(), "local", s.laddr, "err", cause)
	s.all = slices.Delete(s.all, i, i+1)
	s.recv.remove(&q.recv)
	q.recv.dropped = true
	if q.send.failed == nil {
		q.send.failed = cause
	}
	s.owner.forget(q)
	s.send.remove(&q.send.wait)
	s.send.mu.Unlock()
	q.recv.wait.Stop()
	s.recv.readers.WakeAll() // They wait for another queue pair from now on.
	return true
}

// receives returns the number of receives that are posted.
func (s *queuePairs) receives() (n int) {
	s.send.mu.Lock()
	defer s.send.mu.Unlock()
	for _, q := range s.all {
		n += q.recv.receives()
	}
	return n
}

func (s *queuePairs) infos() (infos []Info) {
	s.send.mu.Lock()
	defer s.send.mu.Unlock()
	for _, q := range s.all {
		infos = append(infos, q.info())
	}
	return infos
}

// drain ends all waits and waits for what was posted to be sent. The Conn is closed and has
// no goroutines any more.
func (s *queuePairs) drain(until time.Time) {
	for _, q := range s.all {
		s.recv.mu.Lock()
		q.recv.wait.Stop()
		s.recv.mu.Unlock()
		q.send.stop()
		q.send.drain(until)
	}
}

// close releases all queue pairs. The caller holds groups.mu.
func (s *queuePairs) close() (err error) {
	for _, q := range s.all {
		err = errors.Join(err, q.close())
	}
	return err
}
