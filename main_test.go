package rdmanet

import "context"

var tctx = context.Background()
