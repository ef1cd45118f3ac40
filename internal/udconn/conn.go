package udconn

import (
	"errors"
	"net"
	"net/netip"
	"syscall"
	"time"

	"github.com/rdmanet/rdmanet/internal/regmem"
)

// Conn sends and receives datagrams. Its methods are those of PacketConn of package rdmanet,
// and their errors are not wrapped in *net.OpError. All methods may be called by several
// goroutines at once. A Conn is made by Listen or Dial.
type Conn struct {
	shared
	recv   receiver
	send   sender
	groups groups
	udp    *udpSocket // udp is nil if the socket is not open.
	rdma   *rdmaSide  // rdma is nil if no RDMA device serves.
}

// LocalAddr returns the local address.
func (c *Conn) LocalAddr() *net.UDPAddr { return c.laddr }

// RemoteAddr returns the peer of a connected Conn, else nil.
func (c *Conn) RemoteAddr() *net.UDPAddr { return c.raddr }

// Connected reports whether the Conn has one peer only.
func (c *Conn) Connected() bool { return c.connected() }

// Limit returns the greatest length of a datagram, in bytes.
func (c *Conn) Limit() int { return c.limit }

// Closed reports whether Close was called.
func (c *Conn) Closed() bool { return c.closed.Load() }

// Target returns the address that a datagram of WriteBatch is for.
func (c *Conn) Target(d *Datagram) netip.AddrPort { return c.target(d) }

// Read waits for a datagram and copies it into b.
func (c *Conn) Read(b []byte) (int, netip.AddrPort, error) {
	mem, err := regmem.Borrow(b)
	if err != nil {
		return 0, netip.AddrPort{}, err
	}
	defer mem.Return(nil)
	c.recv.mu.Lock()
	defer c.recv.mu.Unlock()
	if err := c.recv.await(); err != nil {
		return 0, netip.AddrPort{}, err
	}
	return c.recv.take(b)
}

// Write sends a datagram to an address that is as Normal returns it.
func (c *Conn) Write(b []byte, to netip.AddrPort) error {
	mem, err := regmem.Borrow(b)
	if err != nil {
		return err
	}
	defer mem.Return(nil)
	_, err = c.writeAll([]Datagram{{Buf: b, Addr: to}})
	return err
}

// WritePeer sends a datagram to the peer of a connected Conn.
func (c *Conn) WritePeer(b []byte) error { return c.Write(b, c.remote) }

// ReadBatch waits for a datagram, and takes those behind it that are there too.
func (c *Conn) ReadBatch(ds []Datagram) (n int, err error) {
	if len(ds) == 0 {
		return 0, nil
	}
	usable, held := borrowAll(ds)
	if usable == 0 {
		return 0, regmem.ErrFreed
	}
	ds = ds[:usable]
	defer returnAll(held)
	c.recv.mu.Lock()
	defer c.recv.mu.Unlock()
	if err := c.recv.await(); err != nil {
		return 0, err
	}
	for n < len(ds) && c.recv.in.len() > 0 {
		d := &ds[n]
		if d.N, d.Addr, err = c.recv.take(d.Buf); err != nil {
			return n, err
		}
		n++
	}
	return n, nil
}

// WriteBatch sends datagrams, and returns how many, and why not the next one.
func (c *Conn) WriteBatch(ds []Datagram) (n int, err error) {
	usable, held := borrowAll(ds)
	defer returnAll(held)
	if n, err = c.writeAll(ds[:usable]); err == nil && n < len(ds) {
		err = regmem.ErrFreed
	}
	return n, err
}

// borrowAll is regmem.Borrow for the memory of a batch. It returns how many of the datagrams
// may be used: the next one, if there is one, names memory after Free. It also returns what it
// has borrowed.
func borrowAll(ds []Datagram) (usable int, held []*regmem.Memory) {
	for i := range ds {
		mem, err := regmem.Borrow(ds[i].Buf)
		if err != nil {
			return i, held
		}
		if mem != nil {
			held = append(held, mem)
		}
	}
	return len(ds), held
}

// returnAll gives back what borrowAll has borrowed.
func returnAll(held []*regmem.Memory) {
	for _, mem := range held {
		mem.Return(nil)
	}
}

// writeAll sends datagrams and returns how many, and why not the next one.
func (c *Conn) writeAll(ds []Datagram) (n int, err error) {
	for n < len(ds) && err == nil {
		var k, bytes int
		if c.rdma != nil {
			k, err = c.rdma.out.write(ds[n:])
		} else {
			k, err = c.writeUDP(ds[n:])
		}
		for i := range k {
			bytes += len(ds[n+i].Buf)
		}
		c.datagramsSent.Add(uint64(k))
		c.bytesSent.Add(uint64(bytes))
		n += k
	}
	return n, err
}

// writeUDP sends the first datagram by the UDP socket.
func (c *Conn) writeUDP(ds []Datagram) (n int, err error) {
	d := &ds[0]
	to := c.target(d)
	switch err := c.check(d.Buf, to); {
	case err != nil:
		return 0, err
	case c.closed.Load():
		return 0, net.ErrClosed
	}
	if err := c.udp.send(d.Buf, to); err != nil {
		return 0, err
	}
	return 1, nil
}

// SetReadDeadline bounds reads; a zero t is no bound.
func (c *Conn) SetReadDeadline(t time.Time) error {
	c.recv.mu.Lock()
	defer c.recv.mu.Unlock()
	if c.closed.Load() {
		return net.ErrClosed
	}
	c.recv.due.Set(t)
	c.recv.wakeAll()
	return nil
}

// SetWriteDeadline bounds writes; a zero t is no bound.
func (c *Conn) SetWriteDeadline(t time.Time) error {
	c.send.mu.Lock()
	defer c.send.mu.Unlock()
	if c.closed.Load() {
		return net.ErrClosed
	}
	c.send.due.Set(t)
	c.send.wakeAll()
	if c.udp != nil {
		return c.udp.setWriteDeadline(t)
	}
	return nil
}

// SetReadBuffer sets how many bytes of datagrams may wait for a reader, Charge for each
// included.
func (c *Conn) SetReadBuffer(bytes int) error {
	if bytes < 0 || bytes > maxInbox {
		return syscall.EINVAL
	}
	c.recv.mu.Lock()
	defer c.recv.mu.Unlock()
	if c.closed.Load() {
		return net.ErrClosed
	}
	c.recv.in.limit = bytes
	if c.udp != nil {
		return c.udp.setReadBuffer(bytes)
	}
	return nil
}

// SetWriteBuffer sets the size of the UDP socket's buffer.
func (c *Conn) SetWriteBuffer(bytes int) error {
	if c.closed.Load() {
		return net.ErrClosed
	}
	if c.udp != nil {
		return c.udp.setWriteBuffer(bytes)
	}
	return nil
}

// JoinGroup joins a multicast group by an interface, nil for the one that the system chooses.
func (c *Conn) JoinGroup(ifi *net.Interface, group netip.Addr) error {
	c.groups.mu.Lock()
	defer c.groups.mu.Unlock()
	return c.groups.join(ifi, group)
}

// LeaveGroup leaves a multicast group.
func (c *Conn) LeaveGroup(ifi *net.Interface, group netip.Addr) error {
	c.groups.mu.Lock()
	defer c.groups.mu.Unlock()
	return c.groups.leave(ifi, group)
}

// SetMulticastLoopback says whether datagrams to groups come back to this Conn.
func (c *Conn) SetMulticastLoopback(on bool) error {
	c.groups.mu.Lock()
	defer c.groups.mu.Unlock()
	return c.groups.setLoopback(on)
}

// SetMulticastInterface sets the interface by which datagrams to groups leave.
func (c *Conn) SetMulticastInterface(ifi *net.Interface) error {
	c.groups.mu.Lock()
	defer c.groups.mu.Unlock()
	return c.groups.setInterface(ifi)
}

// ListenOnly makes a Conn that Listen has returned a member of one group. Datagrams to groups
// leave by the interface, and do not come back.
func (c *Conn) ListenOnly(ifi *net.Interface, group netip.Addr) error {
	c.groups.mu.Lock()
	defer c.groups.mu.Unlock()
	if ifi != nil {
		if err := c.groups.setInterface(ifi); err != nil {
			return err
		}
	}
	if err := c.groups.setLoopback(false); err != nil {
		return err
	}
	return c.groups.join(ifi, group)
}

// Stats returns the counters of the moment.
func (c *Conn) Stats() Stats {
	s := c.counters.stats()
	if c.rdma != nil {
		c.rdma.stats(&s)
	}
	return s
}

// Info returns the queue pairs and the UDP socket that are open.
func (c *Conn) Info() []Info {
	var infos []Info
	if c.rdma != nil {
		infos = c.rdma.qps.infos()
	}
	if c.udp != nil {
		infos = append(infos, c.udp.info())
	}
	return infos
}

// Close ends the Conn. What was posted before is sent, within Settings.Linger. The second call
// returns net.ErrClosed.
func (c *Conn) Close() error {
	if !c.shut() {
		return net.ErrClosed
	}
	return c.release()
}

// shut makes all calls fail that are in progress or yet to come.
func (c *Conn) shut() bool {
	c.recv.mu.Lock()
	defer c.recv.mu.Unlock()
	c.send.mu.Lock()
	defer c.send.mu.Unlock()
	if c.closed.Swap(true) {
		return false
	}
	c.recv.due.Stop()
	c.send.due.Stop()
	c.recv.wakeAll()
	c.send.wakeAll()
	c.cancel()
	return true
}

// release gives back what shut has stopped the use of.
func (c *Conn) release() (err error) {
	if c.udp != nil {
		err = c.udp.close()
	}
	if c.rdma != nil {
		err = errors.Join(err, c.rdma.closeListener())
	}
	c.wg.Wait()
	if c.rdma != nil {
		c.groups.mu.Lock()
		defer c.groups.mu.Unlock()
		err = errors.Join(err, c.rdma.close())
	}
	return err
}
