package rdmanet

import "github.com/rdmanet/rdmanet/ibv"

// expose opens exactly b to this connection's peer, and to nobody else's, until
// the region is closed: on a device without regions of one queue pair the
// domain is this connection's own. Memory that cannot be registered matches
// syscall.ENOBUFS.
func (c *Conn) expose(b []byte, access ibv.Access) (ibv.MR, error) {
	reg := c.qp.RegMR
	if c.dom.private {
		reg = c.dom.pd.RegMR
	}
	mr, err := reg(b, access)
	if err != nil {
		return nil, noMemory(c.dom.dev, len(b), "TransferMemory", err)
	}
	return mr, nil
}

// scratchBytes is the size of a piece of scratch memory.
const scratchBytes = 256 << 10
