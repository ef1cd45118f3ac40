package rdmanet

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"net/netip"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/rdmanet/rdmanet/internal/cqwait"
	"github.com/rdmanet/rdmanet/internal/deadline"
	"github.com/rdmanet/rdmanet/internal/errno"
	"github.com/rdmanet/rdmanet/internal/neterr"
	"github.com/rdmanet/rdmanet/internal/regmem"
)

// ListenPacket opens a connection for datagrams at the local address. network is
// "udp", "udp4" (IPv4 only), "udp6" (IPv6 only), or "rdma", "rdma4", "rdma6", which
// mean the same here; address is host:port, where an empty host means every
// address and port 0 a port that is free. What is returned is a *PacketConn.
//
// It takes the RDMA device that has the address, if that can do datagrams (siw
// cannot), and the software device beside it: see [PacketConn].
func ListenPacket(network, address string) (net.PacketConn, error) {
	return new(ListenConfig).ListenPacket(context.Background(), network, address)
}

// ListenPacket opens a connection for datagrams; see the function ListenPacket.
// ctx concerns opening only. Backlog does not apply.
func (lc *ListenConfig) ListenPacket(ctx context.Context, network, address string) (net.PacketConn, error) {
	p, addr, err := lc.listenPacket(ctx, network, address)
	if err != nil {
		return nil, opError("listen", nil, addr, dialError(err))
	}
	return newPacketHandle(p), nil
}

// packetConn is what a PacketConn leads to, as conn is of a Conn.
type packetConn struct {
	cfg           Config
	lasting       bool           // see acquireDomain
	local, remote netip.AddrPort // remote is that of a connected one
	laddr, raddr  *net.UDPAddr
	bound         netip.Addr // that was asked for, invalid where both families are served
	limit         int        // bytes of a datagram
	log           *slog.Logger
	start         time.Time // for now

	soft *udpLink // the software device, if it serves
	ud   *udSide  // RDMA devices, if any does

	ctx    context.Context // until Close
	cancel context.CancelFunc
	closed atomic.Bool // set with both locks held
	wg     sync.WaitGroup

	stats packetStats

	// Multicast groups. deaf is set when what was sent here is not wanted back.
	joining sync.Mutex // one change at a time; goes before all other locks
	group   netip.Addr // of ListenMulticast
	members map[membership]*member
	out     *net.Interface // that leads to groups
	deaf    atomic.Bool

	rmu     sync.Mutex
	readers cqwait.Group
	in      inbox
	readDue deadline.Deadline
	news    error // for the next Read, once
	lost    error // nothing will come any more

	wmu      sync.Mutex
	writers  cqwait.Group
	writeDue deadline.Deadline
}

// Sizes of a PacketConn.
const (
	// readBuffer is what may wait for the reader, in bytes, until SetReadBuffer
	// says otherwise: about what Linux gives a socket.
	readBuffer    = 256 << 10
	maxReadBuffer = 1 << 30
)

func newPacketConn(cfg *Config) *packetConn {
	p := &packetConn{cfg: *cfg, lasting: cfg.Provider == nil, log: cfg.Logger, start: time.Now()}
	if p.log == nil {
		p.log = discardLogger
	}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.in.limit = readBuffer
	p.readers.Init(&p.rmu, true)
	p.writers.Init(&p.wmu, false)
	p.readDue.Init(func() {
		p.rmu.Lock()
		defer p.rmu.Unlock()
		if p.readDue.Check() {
			p.wakeReaders()
		}
	})
	p.writeDue.Init(func() {
		p.wmu.Lock()
		defer p.wmu.Unlock()
		if p.writeDue.Check() {
			p.wakeWriters()
		}
	})
	return p
}

// at sets the local address, known once something is bound.
func (p *packetConn) at(local netip.AddrPort) {
	p.local, p.laddr = local, udpAddr(local)
}

// now is the time since the connection was opened, which is cheap to keep.
func (p *packetConn) now() time.Duration { return time.Since(p.start) }

// ReadFrom implements [PacketConn.ReadFrom].
func (p *packetConn) ReadFrom(b []byte) (n int, addr net.Addr, err error) {
	n, from, err := p.read(b)
	if err != nil {
		return 0, nil, p.opError("read", err)
	}
	return n, udpAddr(from), nil
}

// ReadFromUDPAddrPort implements [PacketConn.ReadFromUDPAddrPort].
func (p *packetConn) ReadFromUDPAddrPort(b []byte) (n int, addr netip.AddrPort, err error) {
	n, addr, err = p.read(b)
	if err != nil {
		err = p.opError("read", err)
	}
	return n, addr, err
}

// Read implements [PacketConn.Read].
func (p *packetConn) Read(b []byte) (int, error) {
	n, _, err := p.read(b)
	if err != nil {
		err = p.opError("read", err)
	}
	return n, err
}

// WriteTo implements [PacketConn.WriteTo].
func (p *packetConn) WriteTo(b []byte, addr net.Addr) (int, error) {
	ua, ok := addr.(*net.UDPAddr)
	switch {
	case ok && ua != nil && isPort(ua.Port):
		return p.WriteToUDPAddrPort(b, ua.AddrPort())
	case ok && ua != nil:
	case ok:
		addr = nil
	}
	return 0, opError("write", p.laddr, addr, syscall.EINVAL)
}

// WriteToUDPAddrPort implements [PacketConn.WriteToUDPAddrPort].
func (p *packetConn) WriteToUDPAddrPort(b []byte, addr netip.AddrPort) (int, error) {
	to := netip.AddrPortFrom(plainZone(addr.Addr().Unmap()), addr.Port())
	err := net.ErrWriteToConnected
	if !p.remote.IsValid() {
		err = p.write(b, to)
	}
	if err != nil {
		return 0, opError("write", p.laddr, udpAddr(to), err)
	}
	return len(b), nil
}

// Write implements [PacketConn.Write].
func (p *packetConn) Write(b []byte) (int, error) {
	var err error = errno.EDESTADDRREQ
	if p.remote.IsValid() {
		err = p.write(b, p.remote)
	}
	if err != nil {
		return 0, p.opError("write", err)
	}
	return len(b), nil
}

// LocalAddr implements [PacketConn.LocalAddr].
func (p *packetConn) LocalAddr() net.Addr { return p.laddr }

// RemoteAddr implements [PacketConn.RemoteAddr].
func (p *packetConn) RemoteAddr() net.Addr {
	if p.raddr == nil {
		return nil
	}
	return p.raddr
}

// MaxDatagramSize implements [PacketConn.MaxDatagramSize].
func (p *packetConn) MaxDatagramSize() int { return p.limit }

// SetDeadline implements [PacketConn.SetDeadline].
func (p *packetConn) SetDeadline(t time.Time) error {
	if err := p.SetReadDeadline(t); err != nil {
		return err
	}
	return p.SetWriteDeadline(t)
}

// SetReadDeadline implements [PacketConn.SetReadDeadline].
func (p *packetConn) SetReadDeadline(t time.Time) error {
	p.rmu.Lock()
	defer p.rmu.Unlock()
	if p.closed.Load() {
		return p.opError("set", net.ErrClosed)
	}
	p.readDue.Set(t)
	p.wakeReaders()
	return nil
}

// SetWriteDeadline implements [PacketConn.SetWriteDeadline].
func (p *packetConn) SetWriteDeadline(t time.Time) error {
	p.wmu.Lock()
	defer p.wmu.Unlock()
	if p.closed.Load() {
		return p.opError("set", net.ErrClosed)
	}
	p.writeDue.Set(t)
	p.wakeWriters()
	if p.soft != nil {
		if err := p.soft.conn.SetWriteDeadline(t); err != nil {
			return p.opError("set", neterr.Inner(err))
		}
	}
	return nil
}

// SetReadBuffer implements [PacketConn.SetReadBuffer].
func (p *packetConn) SetReadBuffer(bytes int) error {
	if bytes < 0 || bytes > maxReadBuffer {
		return p.opError("set", syscall.EINVAL)
	}
	p.rmu.Lock()
	defer p.rmu.Unlock()
	if p.closed.Load() {
		return p.opError("set", net.ErrClosed)
	}
	p.in.limit = bytes
	if p.soft != nil {
		if err := p.soft.conn.SetReadBuffer(bytes); err != nil {
			return p.opError("set", neterr.Inner(err))
		}
	}
	return nil
}

// SetWriteBuffer implements [PacketConn.SetWriteBuffer].
func (p *packetConn) SetWriteBuffer(bytes int) error {
	if p.closed.Load() {
		return p.opError("set", net.ErrClosed)
	}
	if p.soft != nil {
		if err := p.soft.conn.SetWriteBuffer(bytes); err != nil {
			return p.opError("set", neterr.Inner(err))
		}
	}
	return nil
}

// Close implements [PacketConn.Close].
func (p *packetConn) Close() error {
	if !p.shut() {
		return p.opError("close", net.ErrClosed)
	}
	if err := p.release(); err != nil {
		return p.opError("close", err)
	}
	return nil
}

// shut makes all calls fail that are in progress or yet to come.
func (p *packetConn) shut() bool {
	p.rmu.Lock()
	defer p.rmu.Unlock()
	p.wmu.Lock()
	defer p.wmu.Unlock()
	if p.closed.Swap(true) {
		return false
	}
	p.readDue.Stop()
	p.writeDue.Stop()
	p.wakeReaders()
	p.wakeWriters()
	p.cancel()
	return true
}

// release gives back what shut has stopped the use of.
func (p *packetConn) release() (err error) {
	if p.soft != nil {
		err = neterr.Inner(p.soft.conn.Close())
	}
	if p.ud != nil && p.ud.listener != nil {
		err = errors.Join(err, p.ud.listener.Close())
	}
	p.wg.Wait()
	if p.ud != nil {
		p.joining.Lock()
		defer p.joining.Unlock()
		err = errors.Join(err, p.ud.release())
	}
	return err
}

// read takes the next datagram.
func (p *packetConn) read(b []byte) (int, netip.AddrPort, error) {
	buf, err := regmem.Borrow(b)
	if err != nil {
		return 0, netip.AddrPort{}, err
	}
	defer buf.Return(nil)
	p.rmu.Lock()
	defer p.rmu.Unlock()
	if err := p.awaitDatagram(); err != nil {
		return 0, netip.AddrPort{}, err
	}
	n, from := p.take(b)
	return n, from, nil
}

// take takes a datagram that is there. The caller holds rmu.
func (p *packetConn) take(b []byte) (n int, from netip.AddrPort) {
	n, from = p.in.pop(b)
	p.stats.datagramsReceived.Add(1)
	p.stats.bytesReceived.Add(uint64(n))
	return n, from
}

// awaitDatagram waits until there is one. The caller holds rmu.
func (p *packetConn) awaitDatagram() error {
	for {
		switch {
		case p.closed.Load():
			return net.ErrClosed
		case p.readDue.Expired():
			return os.ErrDeadlineExceeded
		case p.in.len() > 0:
			return nil
		case p.news != nil:
			err := p.news
			p.news = nil
			return err
		case p.lost != nil:
			return p.lost
		}
		p.awaitRead()
	}
}

// awaitRead waits until something may have changed. The caller holds rmu.
func (p *packetConn) awaitRead() {
	switch l := p.firstQP(); {
	case l == nil || l.dropped:
		p.readers.Wait()
	case !l.wait.Leading() && l.poll() > 0:
		p.readers.Wake() // another reader leads next
	default:
		l.wait.Await(&p.readers, l.answerDue())
	}
}

// firstQP is the queue pair that readers lead, if there is one. The caller holds rmu.
func (p *packetConn) firstQP() *udQP {
	if p.ud == nil {
		return nil
	}
	return p.ud.first
}

// deliver puts a datagram where the reader finds it. The caller holds rmu, and wakes
// readers.
func (p *packetConn) deliver(from netip.AddrPort, payload []byte) {
	switch {
	case p.remote.IsValid() && from != p.remote:
		p.stats.strays.Add(1)
	case !p.in.push(from, payload):
		p.stats.overruns.Add(1)
	}
}

// rouse has as many readers look as there are datagrams: those who wait for others, and,
// if they are too few, the one who waits for the first queue pair. The caller holds rmu.
func (p *packetConn) rouse() {
	n := p.in.len()
	switch {
	case min(n, p.readers.Waiting()) > 1:
		p.readers.WakeAll()
	case min(n, p.readers.Waiting()) == 1:
		p.readers.Wake()
	}
	if l := p.firstQP(); l != nil && n > p.readers.Waiting() && !l.wait.InBackground() {
		l.wait.Interrupt()
	}
}

// quiet reports whether a reader has nothing to return with. The caller holds rmu.
func (p *packetConn) quiet() bool {
	return !p.closed.Load() && !p.readDue.Expired() && p.in.len() == 0 && p.news == nil && p.lost == nil
}

// wakeReaders makes all who wait for datagrams look again. The caller holds rmu.
func (p *packetConn) wakeReaders() {
	p.readers.WakeAll()
	if p.ud == nil {
		return
	}
	for _, l := range p.ud.links {
		l.wait.Interrupt()
	}
}

// errDatagramTooLong says where the limit is to be had.
var errDatagramTooLong = fmt.Errorf("longer than PacketConn.MaxDatagramSize: %w", errno.EMSGSIZE)

// check says why a datagram cannot be sent.
func (p *packetConn) check(b []byte, to netip.AddrPort) error {
	switch {
	case p.remote.IsValid() && to != p.remote:
		return net.ErrWriteToConnected
	case len(b) > p.limit:
		return errDatagramTooLong
	case !to.IsValid() || to.Port() == 0 || to.Addr().IsUnspecified():
		return errno.EDESTADDRREQ
	case p.bound.IsValid() && p.bound.Is4() != to.Addr().Is4():
		return syscall.EAFNOSUPPORT
	case to.Addr() == broadcast4 && !p.byUDP(to):
		return errNoBroadcast
	}
	return nil
}

// byUDP reports whether what is sent to an address goes by the software device only.
func (p *packetConn) byUDP(to netip.AddrPort) bool {
	return p.ud == nil || p.soft != nil && isGroup(to.Addr())
}

// write sends a datagram.
func (p *packetConn) write(b []byte, to netip.AddrPort) error {
	buf, err := regmem.Borrow(b)
	if err != nil {
		return err
	}
	defer buf.Return(nil)
	_, err = p.writeAll([]Datagram{{Buf: b, Addr: to}})
	return err
}

// writeSoft sends the first datagram by the software device.
func (p *packetConn) writeSoft(ds []Datagram) (n int, err error) {
	d := &ds[0]
	to := p.target(d)
	switch err := p.check(d.Buf, to); {
	case err != nil:
		return 0, err
	case p.closed.Load():
		return 0, net.ErrClosed
	}
	if err := p.soft.send(d.Buf, to); err != nil {
		return 0, err
	}
	return 1, nil
}

// wakeWriters makes all who wait for room look again. The caller holds wmu.
func (p *packetConn) wakeWriters() {
	p.writers.WakeAll()
	if p.ud == nil {
		return
	}
	for _, l := range p.ud.links {
		l.sendWait.Interrupt()
	}
}

// opError is the error of a call that is about this connection.
func (p *packetConn) opError(op string, err error) error {
	return opError(op, p.laddr, p.RemoteAddr(), err)
}

// tell leaves an error to the next Read of a connected one, as a socket does when it
// hears that nobody is there.
func (p *packetConn) tell(err error) {
	if p.remote.IsValid() && !p.closed.Load() {
		p.rmu.Lock()
		p.news = err
		p.wakeReaders()
		p.rmu.Unlock()
	}
}

func udpAddr(a netip.AddrPort) *net.UDPAddr { return net.UDPAddrFromAddrPort(a) }

// isPort reports whether a number is a port's: conversion would make one of any.
func isPort(n int) bool { return n >= 0 && n <= math.MaxUint16 }

// plainZone writes an address's zone as received ones have it: an interface's name, and
// only where the address needs one.
func plainZone(a netip.Addr) netip.Addr {
	switch zone := a.Zone(); {
	case zone == "":
	case !a.IsLinkLocalUnicast() && !a.IsMulticast():
		return a.WithZone("")
	case zone[0] >= '0' && zone[0] <= '9': // no name, or Atoi would make garbage
		if n, err := strconv.Atoi(zone); err == nil {
			if ifi, err := net.InterfaceByIndex(n); err == nil {
				return a.WithZone(ifi.Name)
			}
		}
	}
	return a
}

// PacketStats counts what a PacketConn has done since it was opened.
type PacketStats struct {
	DatagramsSent     uint64 // written without an error
	DatagramsReceived uint64 // read
	BytesSent         uint64 // payload
	BytesReceived     uint64

	// What was dropped: on arrival because the reader lagged behind, and because
	// its sender is unknown, or not the peer of a connected one, or it was for
	// another port of a group. An RDMA device
	// drops by itself, and tells nobody, what comes with a wrong key, and while
	// no receive is posted: those of Receives and what waits for the reader are
	// there before that happens.
	Overruns uint64
	Strays   uint64

	// What was sent to a group, came back from an RDMA device and was not wanted;
	// see SetMulticastLoopback.
	Looped uint64

	// What was written and then dropped: too much waited for an address to be
	// resolved, or it came to nothing.
	Unsent uint64

	// Over RDMA devices: addresses that were asked for, those of them that came
	// to nothing, and how often a write had to wait for the send queue.
	Resolutions        uint64
	ResolutionFailures uint64
	QueueStalls        uint64

	Peers    int // addresses that are known
	Receives int // datagrams that RDMA devices have room for
}

// packetStats is PacketStats in the making.
type packetStats struct {
	datagramsSent, datagramsReceived, bytesSent, bytesReceived,
	overruns, strays, looped, unsent, resolutions, failures, stalls atomic.Uint64
}

// Stats implements [PacketConn.Stats].
func (p *packetConn) Stats() PacketStats {
	c := &p.stats
	s := PacketStats{
		DatagramsSent: c.datagramsSent.Load(), DatagramsReceived: c.datagramsReceived.Load(),
		BytesSent: c.bytesSent.Load(), BytesReceived: c.bytesReceived.Load(),
		Overruns: c.overruns.Load(), Strays: c.strays.Load(), Looped: c.looped.Load(), Unsent: c.unsent.Load(),
		Resolutions: c.resolutions.Load(), ResolutionFailures: c.failures.Load(), QueueStalls: c.stalls.Load(),
	}
	if p.ud != nil {
		s.Peers, s.Receives = p.ud.count()
	}
	return s
}

// PacketInfo tells of one way by which a PacketConn sends and receives.
type PacketInfo struct {
	Device    string // "iwarp" for the software device
	Transport string // "UDP", "RoCE"
	Port      int    // of the device, counted from 1
	QPN       uint32 // queue pair number, 0 over the software device
	MTU       int    // bytes that a datagram may have there
}

// Info implements [PacketConn.Info].
func (p *packetConn) Info() []PacketInfo {
	var infos []PacketInfo
	if p.ud != nil {
		p.wmu.Lock()
		for _, l := range p.ud.links {
			infos = append(infos, l.info())
		}
		p.wmu.Unlock()
	}
	if p.soft != nil {
		infos = append(infos, PacketInfo{Device: softwareName, Transport: "UDP", Port: 1, MTU: p.soft.limit})
	}
	return infos
}

var _ interface {
	net.PacketConn
	net.Conn
} = (*packetConn)(nil)
